"""Every algorithm of the demo, 80 steps each from the same warm model: held-out accuracy before and after."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import get_args

from benchmarks.report import write_result
from examples.common.cluster import ray_session
from examples.demo.__main__ import Algorithm, DemoConfig, reinforce, warm_start
from examples.demo.task import write_task

STEPS = 80


def main() -> None:
    algorithms: tuple[Algorithm, ...] = get_args(Algorithm.__value__)
    with tempfile.TemporaryDirectory() as folder, ray_session(1, 1):
        task = Path(folder) / "task"
        write_task(task, seed=0)
        model = warm_start(DemoConfig(), task, Path(folder))
        results = {
            name: reinforce(DemoConfig(algorithm=name, steps=STEPS, trace=False), task, model, Path(folder))
            for name in algorithms
        }
    write_result(
        "algorithms",
        {
            "steps": STEPS,
            "accuracy_before": results["grpo"].accuracy_before,
            **{f"accuracy_{name}": result.accuracy_after for name, result in results.items()},
            "runs": {name: vars(result) for name, result in results.items()},
        },
    )


if __name__ == "__main__":
    main()
