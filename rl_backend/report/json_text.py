"""Numbers that JSON does not have, in the files of a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""How they are written: as strings, because a bare ``NaN`` is refused by readers that follow the standard."""


def json_text(value: Any, *, indent: int | None = None, ensure_ascii: bool = True) -> str:
    """``value`` as JSON of the standard, RFC 8259, that can be written as UTF-8.

    Floats that are not finite become one of :data:`NOT_FINITE`; numbers of numpy and torch become Python's.

    Raises:
        TypeError: something that JSON has no form for.
    """
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
    # Half of a pair of surrogates, which UTF-8 has no form for; JSON's escape of it is what Python writes for it too.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def as_number(value: Any) -> float | int | None:
    """What :func:`json_text`, or Python's own ``json``, has written for a number; None for anything else."""
    if isinstance(value, str):
        return float(value) if value in NOT_FINITE else None
    return value if isinstance(value, int | float) else None


_SURROGATE = re.compile("[\ud800-\udfff]")


def _finite(value: Any) -> Any:
    if not isinstance(value, str) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
