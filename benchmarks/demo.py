"""The demo, and the same run with shuffled rewards: accuracies, log-prob gap and seconds of each."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import write_result


def run_demo(folder: Path, *options: str) -> dict[str, Any]:
    """One run of the demo in a process of its own; what it writes to ``summary.json``."""
    subprocess.run([sys.executable, "-m", "examples.demo", "--run-dir", str(folder), *options], check=True)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        demo = run_demo(Path(folder) / "demo")
        shuffled = run_demo(Path(folder) / "shuffled", "--shuffle-rewards")
    write_result(
        "demo",
        {
            "accuracy_before": demo["accuracy_before"],
            "accuracy_after": demo["accuracy_after"],
            "accuracy_shuffled_rewards": shuffled["accuracy_after"],
            "max_log_prob_gap": max(demo["max_log_prob_gap"], shuffled["max_log_prob_gap"]),
            "seconds": demo["seconds"],
            "runs": [demo, shuffled],
        },
    )


if __name__ == "__main__":
    main()
