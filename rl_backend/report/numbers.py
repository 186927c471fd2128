"""Ticks of an axis, and numbers as people write them."""

from __future__ import annotations

import math
from dataclasses import dataclass

TINY = 1e-290
"""Values below cannot be told from 0: what is computed with them would be denormal."""


def short(value: float) -> str:
    """Four significant digits: ``0.3871``, ``12.5k``, ``3.2e-07``."""
    if not math.isfinite(value):
        return {math.inf: "+inf", -math.inf: "-inf"}.get(value, "NaN")
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{_trimmed(mantissa)}e{int(exponent)}"
    if size >= 1e4:
        return f"{_trimmed(f'{value / 1000:.4g}')}k"
    return _trimmed(f"{value:.4g}")


def duration(seconds: float) -> str:
    """``0.8 s``, ``4 min 12 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True)
class Axis:
    """A range of values and the pixels that it is drawn on.

    Attributes:
        ticks: values with a label.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Pixel of ``value``; outside the range, that of its nearer end."""
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return self.start + share * (self.end - self.start)


def linear_axis(low: float, high: float, start: float, end: float, *, about: int = 4, whole: bool = False) -> Axis:
    """An axis over ``low`` to ``high`` that begins and ends at round numbers.

    Args:
        about: number of ticks to aim for.
        whole: ticks at whole numbers alone, and the range left as it is.
    """
    if high - low < 1e-12 * max(abs(low), abs(high), TINY):
        if whole:
            return Axis(low - 1, low + 1, start, end, (low,))
        pad = abs(low) * 0.5
        low, high = (low, low + 1.0) if abs(low) < TINY else (low - pad, high + pad)
    step = _round_step((high - low) / about, (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10))
    if whole:
        step = max(1.0, step)
        first = math.ceil(low / step)
        ticks = tuple(float(n * step) for n in range(first, math.floor(high / step) + 1))
        return Axis(low, high, start, end, ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, start, end, tuple(n * step for n in range(first, last + 1)))


def log_axis(low: float, high: float, start: float, end: float) -> Axis:
    """A logarithmic axis over whole decades; ``low`` > 0."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = math.ceil((last - first) / 5)
    return Axis(10.0**first, 10.0**last, start, end, tuple(10.0**n for n in range(first, last + 1, every)), log=True)


def _round_step(rough: float, factors: tuple[float, ...]) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in factors if factor * power >= rough * (1 - 1e-9))


def _trimmed(number: str) -> str:
    return number.rstrip("0").rstrip(".") if "." in number and "e" not in number else number
