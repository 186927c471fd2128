"""The demo, and the same run with shuffled rewards: accuracies, log-prob gap and seconds of each.

``--backend bridge`` writes ``results/demo_bridge.json`` in place of ``results/demo.json``, which is native's. With ``--moe``
the model is a mixture of experts that is spread over two ranks, and the file ``results/demo_moe.json``. With
``--router-replay R3`` it is one on a single rank, and the file ``results/demo_R3.json``. ``--ahead`` compares steps that
sample one batch ahead with those of runs that take turns, and writes ``results/async_rollout.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import with_accuracies, write_result

MOST = 1.10
"""Times what a step would take if sampling and the rest overlapped without a loss."""


def run_demo(folder: Path, *options: str) -> dict[str, Any]:
    """One run of the demo in a process of its own; what it writes to ``summary.json``."""
    subprocess.run([sys.executable, "-m", "examples.demo", "--run-dir", str(folder), *options], check=True)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def median_seconds(folder: Path) -> dict[str, float]:
    """Of each phase, over the steps after the first five; 0 for one that most steps do not have."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][5:]
    names = [name for name in lines[-1] if name.startswith("seconds/")]
    return {name: statistics.median(line.get(name, 0.0) for line in lines) for name in names}


def compare_ahead(folder: Path, options: Sequence[str], seeds: int) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        for ahead in (0, 1):
            place = folder / f"{seed}-{ahead}"
            summary = run_demo(place, *options, "--seed", str(seed), "--max-staleness", str(ahead))
            runs.append({**with_accuracies(summary), "seed": seed, "median_seconds": median_seconds(place / "grpo")})
    turns, ahead_runs = runs[::2], runs[1::2]
    ratios = [one["step_seconds"] / other["step_seconds"] for one, other in zip(ahead_runs, turns, strict=True)]
    most = []
    for phases in (run["median_seconds"] for run in turns):
        whole, sampling = sum(phases.values()), phases["seconds/sample"]
        most.append(MOST * max(sampling, whole - sampling) / whole)
    return {
        "async_over_sync_seconds": statistics.median(ratios),
        "most_by_phases": statistics.median(most),
        "accuracy_sync": statistics.fmean(run["accuracy_after"] for run in turns),
        "accuracy_async": statistics.fmean(run["accuracy_after"] for run in ahead_runs),
        "accuracy_before": statistics.fmean(run["accuracy_before"] for run in turns),
        "ratios": ratios,
        "most": most,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="native", help="runtime that trains")
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=True, help="also with shuffled rewards")
    parser.add_argument("--moe", action="store_true", help="a Qwen3-MoE on 2 ranks with ep=2")
    parser.add_argument("--router-replay", choices=("R2", "R3"), help="a Qwen3-MoE, with router replay")
    parser.add_argument("--steps", default="120", help="training steps")
    parser.add_argument("--ahead", type=int, default=0, metavar="SEEDS", help="compare sampling ahead, on so many seeds")
    arguments = parser.parse_args()
    options = ["--backend", arguments.backend, "--steps", arguments.steps]
    name = "demo"
    if arguments.moe:
        options += ["--ranks", "2", "--ep", "2"]
        name += "_moe"
    if arguments.router_replay:
        options += ["--router-replay", arguments.router_replay]
        name += f"_{arguments.router_replay}"
    if arguments.moe or arguments.router_replay:
        options += ["--model", "qwen3_moe"]
    name += "" if arguments.backend == "native" else f"_{arguments.backend}"
    with tempfile.TemporaryDirectory() as folder:
        if arguments.ahead:
            write_result("async_rollout", compare_ahead(Path(folder), options, arguments.ahead))
            return
        runs = [run_demo(Path(folder) / "demo", *options)]
        if arguments.control:
            runs.append(run_demo(Path(folder) / "shuffled", *options, "--shuffle-rewards"))
    write_result(
        name,
        {
            "accuracy_before": runs[0]["accuracy_before"],
            "accuracy_after": runs[0]["accuracy_after"],
            **({"accuracy_shuffled_rewards": runs[1]["accuracy_after"]} if arguments.control else {}),
            "max_log_prob_gap": max(run["max_log_prob_gap"] for run in runs),
            "seconds": runs[0]["seconds"],
            "runs": runs,
        },
    )


if __name__ == "__main__":
    main()
