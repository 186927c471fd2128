"""Run folders as a loop of so many steps would leave them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def of_the_run(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of ``metrics.jsonl`` without what the machine decides: times, speeds and memory."""
    prefixes = ("seconds/", "tokens_per_second/", "peak_memory")
    return {name: value for name, value in line.items() if not name.startswith(prefixes)}


def write_run(
    folder: Path,
    steps: int,
    metrics: Callable[[int], Mapping[str, float]],
    samples: Iterable[Mapping[str, Any]] = (),
    **files: Mapping[str, Any],
) -> Path:
    """Writes ``metrics.jsonl``, ``samples.jsonl`` and, of ``files``, ``<name>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"step": step, **metrics(step)}) + "\n" for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder
