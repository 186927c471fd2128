"""Charts of metrics over the steps of a run, and of the seconds of each phase."""

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, batched, groupby, pairwise

from markupsafe import Markup

from rl_backend.lab.picture import Axis, linear_axis, log_axis, path, render, template_text
from rl_backend.lab.report.run_data import PHASE, TENANT, Series
from rl_backend.lab.text import short

WIDTH, HEIGHT = 440, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 8, 26
PHASES_WIDTH, PHASES_HEIGHT, MOST_BARS = 920, 240, 160
MOST_CURVES = 4
# Up to so many points every one is drawn alone; of more, the running mean stands out from them.
EACH_STEP = 60
# A curve is noisy whose way up and down is so many times its range.
NOISY = 4.0
# A logarithmic axis serves values whose largest is so many times the smallest.
MIN_DECADES_RATIO = 30.0


@dataclass(frozen=True)
class Chart:
    """A chart of one or more metrics.

    Attributes:
        note: one sentence on what a reader looks for.
        log: logarithmic where the values span decades.
        full_range: from 0 to 1.
    """

    title: str
    unit: str
    names: Sequence[str]
    note: str = ""
    log: bool = False
    full_range: bool = False


CHARTS = {
    group: [Chart(**chart) for chart in charts] for group, charts in tomllib.loads(template_text("charts.toml")).items()
}
"""Group -> its charts, in the order of the page."""

OTHER = "Other metrics"
EVAL, ERROR = "eval/", "_stderr"


@dataclass(frozen=True)
class Point:
    """A step, or several that share a pixel.

    Attributes:
        first: step; ``last`` is another one when steps were put together.
        mean: of the values, ``low`` and ``high`` their range; NaN when one of them is not finite and none is.
    """

    first: int
    last: int
    mean: float
    low: float
    high: float

    @property
    def step(self) -> float:
        return (self.first + self.last) / 2


def charts_for(names: Iterable[str]) -> dict[str, list[Chart]]:
    """Group -> charts of the metrics that there are, without phases; unknown ones have one each in the last group.

    A metric of several tenants, ``tenant/<name>/<metric>``, is drawn in one chart, of at most ``MOST_CURVES`` curves.
    """
    left: dict[str, list[str]] = {}
    for name in names:
        if not name.startswith(PHASE):
            left.setdefault(name.split("/", 2)[2] if name.startswith(TENANT) else name, []).append(name)
    groups: dict[str, list[Chart]] = {}
    for group, charts in CHARTS.items():
        for chart in charts:
            present = [name for metric in chart.names for name in left.pop(metric, ())]
            groups.setdefault(group, []).extend(replace(chart, names=some) for some in batched(present, MOST_CURVES))
    groups[next(iter(CHARTS))] += _of_held_out_sets(left)
    groups[OTHER] = [Chart(metric, "", some) for metric, of in left.items() for some in batched(of, MOST_CURVES)]
    return {group: charts for group, charts in groups.items() if charts}


def _of_held_out_sets(left: dict[str, list[str]]) -> list[Chart]:
    names: dict[str, list[str]] = {}
    for metric in [metric for metric in left if metric.startswith(EVAL)]:
        found = left.pop(metric)
        if not metric.endswith(ERROR):
            names.setdefault(metric.removeprefix(EVAL).rpartition("/")[0], []).extend(found)
    return [
        Chart(f"Held-out set {name}", "mean over prompts", some, full_range=True)
        for name, of in names.items()
        for some in batched(of, MOST_CURVES)
    ]


def draw_chart(chart: Chart, series: Sequence[Series], run_steps: tuple[int, int], most_points: int) -> Markup:
    """A figure with title, latest value and curves over the run's first to last step."""
    drawn = [points(one, most_points) for one in series]
    across = linear_axis(*run_steps, LEFT, WIDTH - RIGHT, about=7, whole=True)
    up = _value_axis(chart, series)
    missing = sorted({step for one in series for step, _ in one.not_finite})
    return render(
        "chart.html",
        chart=chart,
        series=series,
        latest=" / ".join(short(one.values[-1]) for one in series),
        width=WIDTH,
        height=HEIGHT,
        across=across,
        up=up,
        curves=[_curve(of, across, up) for of in drawn],
        # A mark at each step whose value is not finite, up to a hundred.
        not_finite=[across.at(step) for step in missing[:: math.ceil(len(missing) / 100) or 1]],
        hover=_hover(chart, series, drawn, across, up),
        keys=[(f"s{index}", one.name, None) for index, one in enumerate(series)] if len(series) > 1 else [],
    )


def draw_phases(series: Sequence[Series]) -> Markup:
    """A bar for each step, or for the mean of several; phases from the bottom up in the order of a step."""
    steps = sorted({step for one in series for step in one.steps})
    by_step = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    size = math.ceil(len(steps) / MOST_BARS)
    groups = list(batched(steps, size))
    # A phase that a step did not have took 0 seconds.
    bars = [
        [sum(value for step in group if 0 <= (value := values.get(step, 0.0)) < math.inf) / len(group) for values in by_step]
        for group in groups
    ]
    across = linear_axis(steps[0], steps[-1], LEFT, PHASES_WIDTH - RIGHT, about=8, whole=True)
    up = linear_axis(0.0, max(max(map(sum, bars)), 1e-6), PHASES_HEIGHT - BOTTOM, TOP)
    slot = (PHASES_WIDTH - RIGHT - LEFT) / len(bars)
    gap = 1.0 if slot > 4 else 0.0
    drawn = []
    for index, bar in enumerate(bars):
        x, width = LEFT + index * slot + gap / 2, slot - gap
        for phase, (base, top) in enumerate(pairwise(accumulate(bar, initial=0.0))):
            low, high = up.at(base), up.at(top)
            if low - high > 0.05:
                drawn.append((phase, f"M{x:.1f} {low:.1f}V{high:.1f}h{width:.1f}V{low:.1f}z"))
    # Labels stand below the middles of their bars.
    middles = linear_axis(steps[0], steps[-1], LEFT + slot / 2, PHASES_WIDTH - RIGHT - slot / 2, about=8, whole=True)
    names = [one.name.removeprefix(PHASE) for one in series]
    hover = {
        "bars": [LEFT, slot],
        "names": names,
        "steps": [[group[0], group[-1]] for group in groups],
        "values": [[float(f"{value:.4g}") for value in bar] for bar in bars],
    }
    totals = [sum(value for value in one.values if math.isfinite(value)) for one in series]
    shares = [f"{total / len(steps):.3g} s, {100 * total / (sum(totals) or 1.0):.0f}%" for total in totals]
    return render(
        "phases.html",
        mean=sum(totals) / len(steps),
        width=PHASES_WIDTH,
        height=PHASES_HEIGHT,
        across=across,
        up=up,
        labels=middles if len(bars) > 1 else across,
        bars=drawn,
        slot=slot,
        size=size,
        keys=[(f"s{phase % 8}", *key) for phase, key in enumerate(zip(names, shares, strict=True))],
        hover=json.dumps(hover, separators=(",", ":")),
    )


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


def _curve(of: Sequence[Point], across: Axis, up: Axis) -> dict[str, object]:
    places = [_place(point.step, point.mean, across, up) for point in of]
    grouped = any(point.first != point.last for point in of)
    if not grouped and len(of) <= EACH_STEP:
        return {"line": path(places), "dots": list(filter(None, places)), "steps": len(of), "pale": None}
    behind = _band(of, across, up) if grouped else path(places)
    values = [point.mean for point in of if math.isfinite(point.mean)]
    # Where a curve goes up and down a lot, its running mean says more; a schedule does not.
    if values and sum(abs(after - before) for before, after in pairwise(values)) > NOISY * (max(values) - min(values)):
        means = running_mean([point.mean for point in of], max(2 * (len(of) // 30) + 1, 3))
        places = [_place(point.step, mean, across, up) for point, mean in zip(of, means, strict=True)]
    return {"line": path(places), "pale": "band" if grouped else "faint", "behind": behind}


def _band(of: Sequence[Point], across: Axis, up: Axis) -> str:
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


def _hover(chart: Chart, series: Sequence[Series], drawn: Sequence[Sequence[Point]], across: Axis, up: Axis) -> str:
    curves = [
        {"name": one.name if len(series) > 1 else chart.title, "points": [_hovered(one, point) for point in of]}
        for one, of in zip(series, drawn, strict=True)
    ]
    axes = {"x": [across.low, across.high, across.start, across.end], "y": [up.low, up.high, up.start, up.end]}
    return json.dumps({**axes, "log": up.log, "series": curves}, separators=(",", ":"))


def _hovered(series: Series, point: Point) -> list[float | str]:
    steps = [point.first, point.last - point.first]
    if math.isnan(point.mean):
        return [*steps, short(series.values[series.steps.index(point.first)])]
    values = [point.mean] if point.low == point.high else [point.mean, point.low, point.high]
    return [*steps, *(float(f"{value:.5g}") for value in values)]


def points(series: Series, most: int) -> list[Point]:
    """At most ``most`` points over all steps; neighbours are put together with their extremes."""
    found = []
    for group in batched(zip(series.steps, series.values, strict=True), math.ceil(len(series.steps) / most)):
        finite = [value for _, value in group if math.isfinite(value)]
        # A plain sum of values near the largest float would overflow.
        mean = sum(value / len(finite) for value in finite) if finite else math.nan
        low, high = min(finite, default=math.nan), max(finite, default=math.nan)
        found.append(Point(group[0][0], group[-1][0], mean, low, high))
    return found


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean of the finite values among ``window`` neighbours; NaN where there are none."""
    finite = [value if math.isfinite(value) else None for value in values]
    sums = [*accumulate((value or 0.0 for value in finite), initial=0.0)]
    counts = [*accumulate((value is not None for value in finite), initial=0)]
    means = []
    for index in range(len(values)):
        start, end = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        number = counts[end] - counts[start]
        means.append((sums[end] - sums[start]) / number if number else math.nan)
    return means
