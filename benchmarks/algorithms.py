"""Every algorithm of the demo, 80 steps each from the same warm model: held-out accuracy before and after.

With ``--only NAME`` one is measured anew and the others are kept; the warm model is the same for the same seed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import get_args

from actors.cluster.session import ray_session
from benchmarks.report import read_result, with_accuracies, write_result
from examples.demo.__main__ import Algorithm, DemoConfig, reinforce, warm_start
from examples.demo.task import write_task

STEPS = 80


def main() -> None:
    algorithms: tuple[Algorithm, ...] = get_args(Algorithm.__value__)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=algorithms, action="append", help="this one (may be given several times)")
    chosen = parser.parse_args().only
    runs = read_result("algorithms").get("runs", {}) if chosen else {}
    with tempfile.TemporaryDirectory() as folder, ray_session(1, 1):
        task = Path(folder) / "task"
        write_task(task, seed=0)
        model = warm_start(DemoConfig.model_validate({}), task, Path(folder))
        for name in chosen or algorithms:
            config = DemoConfig.model_validate({"algorithm": name, "steps": STEPS, "trace": False})
            runs[name] = with_accuracies(vars(reinforce(config, task, model, Path(folder))))
    write_result(
        "algorithms",
        {
            "steps": STEPS,
            "accuracy_before": runs["grpo"]["accuracy_before"],
            **{f"accuracy_{name}": runs[name]["accuracy_after"] for name in algorithms if name in runs},
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
