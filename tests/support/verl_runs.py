"""Runs of verl's trainers, by the scripts of examples/verl, and their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

type Metrics = dict[int, dict[str, float]]


def read_metrics(path: Path) -> Metrics:
    """Step -> metrics, of verl's file logger."""
    found: Metrics = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], {}).update(entry["data"])
    return found


def files_of(task: Path, train: str, val: str) -> dict[str, Any]:
    """Options that name the demo's random model and two of its files."""
    return {
        "model": str(task / "model"),
        "train_files": str(task / f"{train}.parquet"),
        "val_files": str(task / f"{val}.parquet"),
    }
