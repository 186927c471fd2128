"""Numbers and tables as people read them, and JSON as programs do."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""What JSON has no numbers for is written as strings, because readers that follow the standard refuse a bare ``NaN``."""

_SURROGATE = re.compile("[\ud800-\udfff]")


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


def count(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``, ``3 micro-batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def table(columns: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """A line for each row, whose cells are set in ``columns``, as in ``"{:10}  {:>8}"``."""
    return [columns.format(*row) for row in rows]


def finite(value: Any, word: Callable[[float], str | None] = lambda _: None) -> Any:
    """``value`` with ``word`` of the floats that JSON has no form for, and Python's numbers for those of numpy and torch."""
    if not isinstance(value, str) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, Mapping):
        return {name: finite(each, word) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each, word) for each in value]
    return word(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """``value`` as JSON of the standard, RFC 8259, that can be written as UTF-8.

    Floats that are not finite become one of :data:`NOT_FINITE`; numbers of numpy and torch become Python's.

    Raises:
        TypeError: something that JSON has no form for.
    """
    text = json.dumps(finite(value, json.dumps), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    # Half of a pair of surrogates, which UTF-8 has no form for; JSON's escape of it is what Python writes for it too.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def as_number(value: Any) -> float | None:
    """What :func:`json_text`, or Python's own ``json``, has written for a number; None for anything else."""
    if not isinstance(value, int | float) and value not in NOT_FINITE:
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _trimmed(number: str) -> str:
    return number.rstrip("0").rstrip(".") if "." in number and "e" not in number else number
