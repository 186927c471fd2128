"""Run folders as a loop of so many steps would leave them, and what two of them have in common."""

from __future__ import annotations

import hashlib
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


# What tells of faults, what depends on what engines have served before, and what is told of other metrics or of the disk.
_NOT_COMPARED = ("engines/", "recovery/", "environment_share", "prompt_tokens_cached", "warnings")
# The rest of a batch is sampled in other company when an engine is lost, which rounds its log-probs; the divergence grows
# with the square of that.
_ROUNDING = {"log_prob_gap": 1e-5, "rollout_kl": 1e-10}


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics, of the steps after the first; a line that is being written has no end yet."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in found if line["step"]]


def outcome(run: Path) -> dict[str, Any]:
    """What runs that are the same have in common: lines of metrics and samples, and digests of weights, by file."""
    found: dict[str, Any] = {}
    for file in sorted(run.rglob("*")):
        name = str(file.relative_to(run))
        if file.name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl"):
            found[name] = [json.loads(line) for line in file.read_text().splitlines()]
        elif file.suffix == ".safetensors" and "checkpoints" not in file.parts:
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Files and metrics in which a run differs from another, times apart; log-probs of engines may differ by rounding."""
    told = [f"only one run has {name}" for name in sorted(found.keys() ^ wanted.keys())]
    for name in sorted(found.keys() & wanted.keys()):
        one, other = found[name], wanted[name]
        if isinstance(one, str) or len(one) != len(other):
            told += [name] if one != other else []
            continue
        for number, (line, expected) in enumerate(zip(map(_compared, one), map(_compared, other), strict=True), start=1):
            wrong = [each for each in line.keys() | expected.keys() if not _same(each, line.get(each), expected.get(each))]
            told += [f"{name}:{number}: {', '.join(sorted(wrong))}"] if wrong else []
    return told


def _compared(line: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in of_the_run(line).items() if not name.startswith(_NOT_COMPARED)}
    # An episode's.
    left = {name: value for name, value in kept.items() if name != "seconds" and not name.endswith("_seconds")}
    return {name: _compared(value) if isinstance(value, Mapping) else value for name, value in left.items()}


def _same(metric: str, one: Any, other: Any) -> bool:
    rounding = next((most for name, most in _ROUNDING.items() if metric.startswith(name)), None)
    if rounding is not None and isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= rounding
    return bool(one == other)
