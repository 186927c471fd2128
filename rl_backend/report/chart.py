"""Metrics over steps as an SVG chart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

from rl_backend.report.html import Html, join, tag
from rl_backend.report.metrics import Chart
from rl_backend.report.numbers import Axis, linear_axis, log_axis, short
from rl_backend.report.series import Point, Series, points, running_mean

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 8, 26
EACH_STEP = 60
"""Up to so many points every one is drawn alone; of more, the running mean stands out from them."""

NOISY = 4.0
"""A curve is noisy whose way up and down is so many times its range."""

MIN_DECADES_RATIO = 30.0
"""A logarithmic axis serves values whose largest is so many times the smallest."""


def draw_chart(chart: Chart, series: Sequence[Series], run_steps: tuple[int, int], most_points: int) -> Html:
    """A figure with title, latest value, curves over the run's first to last step, and what cannot be drawn in words."""
    drawn = [points(one, most_points) for one in series]
    across = linear_axis(*run_steps, LEFT, WIDTH - RIGHT, about=7, whole=True)
    up = _value_axis(chart, series)
    notes = [note for one in series for note in _notes(one, up, named=len(series) > 1)]
    body = [_grid(across, up)]
    for index, of in enumerate(drawn):
        body.append(_curve(of, across, up, index))
    body.append(_marks(series, across))
    body.append(tag("line", class_="cursor", y1=TOP, y2=HEIGHT - BOTTOM, x1=-9, x2=-9))
    body.extend(tag("circle", class_=f"dot s{index}", r=3, cx=-9, cy=-9) for index in range(len(series)))
    return tag(
        "figure",
        _title(chart, series),
        tag(
            "svg",
            *body,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            aria_label=f"{chart.title} over steps",
            data_hover=_hover(chart, series, drawn, across, up),
        ),
        _legend(series) if len(series) > 1 else None,
        tag("figcaption", join(*(tag("span", note, class_="warn") for note in notes)), chart.note or None),
        id=f"chart-{series[0].name}",
    )


def grid_lines(axis: Axis, left: float, right: float) -> Html:
    """Horizontal lines at an axis's ticks, with labels."""
    return join(
        *(
            join(
                tag("line", class_="grid", x1=left, x2=right, y1=f"{axis.at(tick):.1f}", y2=f"{axis.at(tick):.1f}"),
                tag("text", short(tick), x=left - 6, y=f"{axis.at(tick) + 3.5:.1f}", text_anchor="end"),
            )
            for tick in axis.ticks
        )
    )


def step_labels(axis: Axis, height: float) -> Html:
    """Labels of the steps below a chart."""
    labels = [tag("text", short(tick), x=f"{axis.at(tick):.1f}", y=height - 8, text_anchor="middle") for tick in axis.ticks]
    return join(
        *labels, tag("text", "step", x=min(axis.start, axis.at(axis.ticks[0]) - 12) - 6, y=height - 8, text_anchor="end")
    )


def path(coordinates: Sequence[tuple[float, float] | None]) -> str:
    """An SVG path; None breaks the line, and a point between two breaks becomes a dot by its round cap."""
    commands, broken = [], True
    for place in coordinates:
        if place is None:
            broken = True
            continue
        commands.append(f"{'M' if broken else 'L'}{place[0]:.1f} {place[1]:.1f}")
        if broken:
            commands.append("h0")
        broken = False
    return "".join(commands)


def _value_axis(chart: Chart, series: Sequence[Series]) -> Axis:
    values = [value for one in series for value in one.finite]
    bottom, top = HEIGHT - BOTTOM, TOP
    if not values:
        return linear_axis(0.0, 1.0, bottom, top)
    positive = [value for value in values if value > 0]
    if chart.log and positive and max(positive) / min(positive) >= MIN_DECADES_RATIO:
        return log_axis(min(positive), max(positive), bottom, top)
    low, high = min(values), max(values)
    if chart.full_range and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    # The difference of two values near the largest float is infinite.
    limit = 1e300
    return linear_axis(max(low, -limit), min(high, limit), bottom, top)


def _is_noisy(of: Sequence[Point]) -> bool:
    """Whether the curve goes up and down so much that its running mean says more; a schedule does not."""
    means = [point.mean for point in of if math.isfinite(point.mean)]
    way = sum(abs(after - before) for before, after in pairwise(means))
    return bool(means) and way > NOISY * (max(means) - min(means))


def _curve(of: Sequence[Point], across: Axis, up: Axis, index: int) -> Html:
    """The values with a dot at each; of many, pale, and in front of them their running mean."""

    def line(value: Callable[[Point], float]) -> list[tuple[float, float] | None]:
        return [_place(point.step, value(point), across, up) for point in of]

    grouped = any(point.first != point.last for point in of)
    if not grouped and len(of) <= EACH_STEP:
        marked = line(lambda point: point.mean)
        dots = [tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2 if len(of) > 3 else 3.5) for x, y in filter(None, marked)]
        curve = tag("path", class_=f"line s{index}", d=path(line(lambda point: point.mean)))
        return join(curve, tag("g", *dots, class_=f"dots s{index}"))
    faint = _band(of, across, up) if grouped else path(line(lambda point: point.mean))
    means = [point.mean for point in of]
    if _is_noisy(of):
        means = running_mean(means, max(2 * (len(of) // 30) + 1, 3))
    front = [_place(point.step, mean, across, up) for point, mean in zip(of, means, strict=True)]
    return join(
        tag("path", class_=f"{'band' if grouped else 'faint'} s{index}", d=faint),
        tag("path", class_=f"line s{index}", d=path(front)),
    )


def _band(of: Sequence[Point], across: Axis, up: Axis) -> str:
    """The area between lowest and highest value, a piece for each run of finite ones."""
    pieces = []
    for finite, run in groupby(of, key=lambda point: math.isfinite(point.mean)):
        if finite:
            piece = list(run)
            upper = [_place(point.step, point.high, across, up) for point in piece]
            lower = [_place(point.step, point.low, across, up) for point in reversed(piece)]
            pieces.append(path([*upper, *lower]) + "z")
    return "".join(pieces)


def _place(step: float, value: float, across: Axis, up: Axis) -> tuple[float, float] | None:
    if not math.isfinite(value):
        return None
    return across.at(step), up.at(value) if value > 0 or not up.log else up.start


def _grid(across: Axis, up: Axis) -> Html:
    return join(grid_lines(up, LEFT, WIDTH - RIGHT), step_labels(across, HEIGHT))


def _marks(series: Sequence[Series], across: Axis) -> Html:
    """A triangle on the axis at each step whose value is not finite, up to a hundred."""
    steps = sorted({step for one in series for step, _ in one.not_finite})
    drawn = steps[:: math.ceil(len(steps) / 100)] if steps else []
    bottom = HEIGHT - BOTTOM
    places = (across.at(step) for step in drawn)
    return join(*(tag("path", class_="not-finite", d=f"M{x - 4:.1f} {bottom}h8l-4 -8z") for x in places))


def _notes(series: Series, up: Axis, *, named: bool) -> list[str]:
    """What the curve cannot show."""
    notes = []
    prefix = f"{series.name}: " if named else ""
    if missing := series.not_finite:
        step, value = missing[0]
        notes.append(
            f"{prefix}{len(missing)} of {len(series.steps)} values not finite, first {short(value)} at step {step}. "
        )
    below = sum(value <= 0 for value in series.finite) if up.log else 0
    if below:
        notes.append(f"{prefix}{below} values of 0 or below are drawn at the bottom of the logarithmic axis. ")
    return notes


def _title(chart: Chart, series: Sequence[Series]) -> Html:
    latest = " / ".join(short(one.values[-1]) for one in series)
    unit = tag("span", chart.unit, class_="unit") if chart.unit else None
    return tag("h3", chart.title, unit, tag("output", latest, title=f"at step {series[0].steps[-1]}"))


def _legend(series: Sequence[Series]) -> Html:
    return tag(
        "p",
        *(tag("span", tag("i", class_=f"s{index}"), one.name, class_="key") for index, one in enumerate(series)),
        class_="legend",
    )


def _hover(chart: Chart, series: Sequence[Series], drawn: Sequence[Sequence[Point]], across: Axis, up: Axis) -> str:
    """JSON that report.js needs to show the values below the pointer."""
    return json.dumps(
        {
            "x": [across.low, across.high, across.start, across.end],
            "y": [up.low, up.high, up.start, up.end],
            "log": up.log,
            "series": [
                {
                    "name": one.name if len(series) > 1 else chart.title,
                    "points": [
                        [point.first, point.last - point.first]
                        + [
                            _json(value)
                            for value in ([point.mean] if point.low == point.high else [point.mean, point.low, point.high])
                        ]
                        if not math.isnan(point.mean)
                        else [point.first, point.last - point.first, short(one.values[one.steps.index(point.first)])]
                        for point in of
                    ],
                }
                for one, of in zip(series, drawn, strict=True)
            ],
        },
        separators=(",", ":"),
    )


def _json(value: float) -> float:
    return float(f"{value:.5g}")
