"""Seconds of each phase of a step, on top of each other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from rl_backend.lab.picture import Html, drawing, grid_lines, legend, linear_axis, step_labels, tag
from rl_backend.lab.report.metrics import PHASE
from rl_backend.lab.report.run_data import Series
from rl_backend.lab.text import short

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 920, 240, 52, 20, 8, 26
MOST_BARS = 160


def draw_phases(series: Sequence[Series]) -> Html:
    """A bar for each step, or for several together their mean; phases from the bottom up in the order of a step."""
    steps = sorted({step for one in series for step in one.steps})
    by_step = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    size = math.ceil(len(steps) / MOST_BARS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    bars = [[_mean(values, group) for values in by_step] for group in groups]
    across = linear_axis(steps[0], steps[-1], LEFT, WIDTH - RIGHT, about=8, whole=True)
    up = linear_axis(0.0, max(max(map(sum, bars)), 1e-6), HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - RIGHT - LEFT) / len(bars)
    gap = 1.0 if slot > 4 else 0.0
    rectangles = []
    for index, bar in enumerate(bars):
        base = 0.0
        for phase, seconds in enumerate(bar):
            low, high = up.at(base), up.at(base + seconds)
            base += seconds
            if low - high > 0.05:
                x, width = LEFT + index * slot + gap / 2, slot - gap
                rectangles.append(
                    tag("path", class_=f"bar s{phase % 8}", d=f"M{x:.1f} {low:.1f}V{high:.1f}h{width:.1f}V{low:.1f}z")
                )
    # Labels stand below the middles of their bars.
    shown = linear_axis(steps[0], steps[-1], LEFT + slot / 2, WIDTH - RIGHT - slot / 2, about=8, whole=True)
    names = [one.name.removeprefix(PHASE) for one in series]
    hover = {
        "bars": [LEFT, slot],
        "names": names,
        "steps": [[group[0], group[-1]] for group in groups],
        "values": [[float(f"{value:.4g}") for value in bar] for bar in bars],
    }
    totals = [sum(value for value in one.values if math.isfinite(value)) for one in series]
    mean = f"{short(sum(totals) / len(steps))} s per step"
    return tag(
        "figure",
        tag("h3", "Time of a step by phase", tag("span", "seconds", class_="unit"), tag("output", mean)),
        drawing(
            WIDTH,
            HEIGHT,
            "seconds of each phase over steps",
            grid_lines(up, LEFT, WIDTH - RIGHT),
            step_labels(shown if len(bars) > 1 else across, HEIGHT),
            *rectangles,
            tag("rect", class_="cursor-bar", y=TOP, height=HEIGHT - TOP - BOTTOM, width=f"{slot:.1f}", x=-999),
            data_hover=json.dumps(hover, separators=(",", ":")),
        ),
        legend(_keys(names, totals, len(steps))),
        tag("figcaption", f"Each bar is the mean of {size} steps." if size > 1 else "Each bar is one step."),
        class_="wide",
        id="phases",
    )


def _mean(values: dict[int, float], steps: Sequence[int]) -> float:
    """Mean over ``steps``; a phase that a step did not have took 0 seconds."""
    finite = [value for step in steps if math.isfinite(value := values.get(step, 0.0)) and value >= 0]
    return sum(finite) / len(steps)


def _keys(names: Sequence[str], totals: Sequence[float], steps: int) -> Iterator[tuple[str, list[Html | str]]]:
    whole = sum(totals) or 1.0
    for index, (name, total) in enumerate(zip(names, totals, strict=True)):
        share = f"{total / steps:.3g} s, {100 * total / whole:.0f}%"
        yield f"s{index % 8}", [name, " ", tag("small", share)]
