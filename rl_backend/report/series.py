"""A metric over the steps of a run, and the points that are drawn of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Series:
    """One metric: ``values[i]`` at ``steps[i]``, in the order of the steps; values may be NaN or infinite."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    @property
    def not_finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)]


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


def points(series: Series, most: int) -> list[Point]:
    """At most ``most`` points over all steps; neighbours are put together, which keeps their extremes."""
    count = len(series.steps)
    size = math.ceil(count / most)
    return [_point(series, start, min(start + size, count)) for start in range(0, count, size)]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean of the finite values among ``window`` neighbours; NaN where there are none."""
    finite = [math.isfinite(value) for value in values]
    sums = [0.0, *accumulate(value if known else 0.0 for value, known in zip(values, finite, strict=True))]
    counts = [0, *accumulate(map(int, finite))]
    half = window // 2
    means = []
    for index in range(len(values)):
        start, end = max(0, index - half), min(len(values), index + half + 1)
        number = counts[end] - counts[start]
        means.append((sums[end] - sums[start]) / number if number else math.nan)
    return means


def _point(series: Series, start: int, end: int) -> Point:
    finite = [value for value in series.values[start:end] if math.isfinite(value)]
    first, last = series.steps[start], series.steps[end - 1]
    if not finite:
        return Point(first, last, math.nan, math.nan, math.nan)
    # A plain sum of values near the largest float would overflow.
    mean = sum(value / len(finite) for value in finite)
    return Point(first, last, mean, min(finite), max(finite))
