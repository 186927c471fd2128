"""Runs of verl's trainers, by the scripts of examples/verl, and their metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.verl.options import VerlOptions

type Metrics = dict[int, dict[str, float]]


def run_trainer[O: VerlOptions](train: Callable[[O], Path], options: O) -> Metrics:
    """Runs a script of examples/verl, each process of it on one thread: the models are tiny, and other threads only wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return read_metrics(train(options))


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
