"""JSON files that people edit and disks damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or not an object.
    """
    try:
        found = json.loads(file.read_text())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"is a {type(found).__name__}, not a JSON object")
    return found
