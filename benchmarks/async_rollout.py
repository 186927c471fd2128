"""The demo with samples of the weights one step before against strictly on-policy: seconds of the steps, and accuracies.

Both runs of a seed start from the same warm model, one after the other, in an order that alternates. They have the same
machine, divided as the examples do: on-policy, training and sampling take turns on all cores; sampling ahead, they have half
of them each.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from actors.cluster.session import ray_session
from benchmarks.report import with_accuracies, write_result
from examples.demo.__main__ import DemoConfig, reinforce, warm_start
from examples.demo.task import write_task

SEEDS = (0, 1, 2)
MAX_STALENESS = 1


def run_seed(seed: int, folder: Path) -> list[dict[str, Any]]:
    """On-policy and sampling ahead, in that order in the result."""
    task = folder / "task"
    write_task(task, seed)
    model = warm_start(DemoConfig.model_validate({"seed": seed}), task, folder)
    staleness = (0, MAX_STALENESS) if seed % 2 == 0 else (MAX_STALENESS, 0)
    runs = [run_once(seed, max_staleness, task, model, folder) for max_staleness in staleness]
    return sorted(runs, key=lambda run: run["max_staleness"])


def run_once(seed: int, max_staleness: int, task: Path, model: Path, folder: Path) -> dict[str, Any]:
    config = DemoConfig.model_validate({"seed": seed, "max_staleness": max_staleness, "trace": False})
    run_dir = folder / f"staleness_{max_staleness}"
    result = reinforce(config, task, model, run_dir)
    logged = (run_dir / config.algorithm / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, logged) if line["step"]]  # step 0 is from before training
    phases = [name for name in lines[0] if name.startswith("seconds/")]
    return {
        "seed": seed,
        "max_staleness": max_staleness,
        "steps": config.steps,
        **with_accuracies(vars(result)),
        "staleness_max": max(line.get("staleness_max", 0) for line in lines),
        "median_seconds": {name: statistics.median(line[name] for line in lines) for name in phases},
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ray_session(1, 1):
        pairs = [run_seed(seed, Path(folder) / str(seed)) for seed in SEEDS]
    ratios = [ahead["step_seconds"] / on_policy["step_seconds"] for on_policy, ahead in pairs]
    accuracy_sync, accuracy_async = (
        statistics.median(run["accuracy_after"] for run in runs) for runs in zip(*pairs, strict=True)
    )
    write_result(
        "async_rollout",
        {
            "async_over_sync_seconds": statistics.median(ratios),
            "accuracy_sync": accuracy_sync,
            "accuracy_async": accuracy_async,
            "accuracy_before": statistics.median(pair[0]["accuracy_before"] for pair in pairs),
            "ratios": ratios,
            "runs": [run for pair in pairs for run in pair],
        },
    )


if __name__ == "__main__":
    main()
