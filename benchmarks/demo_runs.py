"""The demo's task learned in other places than one rank and one engine: pipelines, several ranks and engines, two Ray nodes,
a submitted job; by models with a recurrent state; and with a KL to a reference.

Each run is a process of its own, of the commands that a user would type, from random weights or from the warm start of the
first; held-out accuracy before and after, and the largest gap of log-probs to vLLM. ``--only NAME`` measures one anew and
keeps the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from actors.cluster.session import ray_session
from benchmarks.report import machine, read_result, with_accuracies, write_result
from examples.demo.__main__ import LARGEST_ROUNDING, DemoConfig, demo_settings, warm_start
from examples.demo.task import write_task
from rl_backend.contracts import ConfigError
from rl_backend.options.command_line import parse_config
from tests.support.clusters import HeadNode, TwoNodes

STEPS = 60
SECONDS = 3600.0
ZBV = ("--pp", "2", "--vpp", "2", "--train.backend_cfg.pipeline_schedule", "zbv")
DEMOS: dict[str, tuple[str, ...]] = {
    "pp2_1f1b": ("--ranks", "2", "--pp", "2"),
    "pp2_zbv": ("--ranks", "2", *ZBV),
    "pp2_zbv_mixture": ("--ranks", "2", "--model", "qwen3_moe", *ZBV),
    "bridge_pp2": ("--backend", "bridge", "--ranks", "2", "--pp", "2"),
    "two_ranks_two_engines": ("--ranks", "2", "--engines", "2"),
    "qwen3_5": ("--model", "qwen3_5"),
    "qwen3_5_moe_R3": ("--model", "qwen3_5_moe", "--router-replay", "R3"),
    "deepseek_v3_R3": ("--model", "deepseek_v3", "--router-replay", "R3", "--steps", "120"),
    "gpt_oss_R3": ("--model", "gpt_oss", "--router-replay", "R3", "--steps", "150"),
}
"""Options of ``examples.demo``, whose ``STEPS`` they may replace."""


def run_demo(options: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs the demo and returns its ``summary.json``."""
    command = (sys.executable, "-m", "examples.demo", "--run-dir", str(folder), "--steps", str(STEPS), *options)
    subprocess.run(command, check=True, timeout=SECONDS)
    return summary_of(folder)


def made_demo(name: str, folder: Path) -> dict[str, Any]:
    """The figures of a run that exists already; it must have had the options of ``name``."""
    options = ("--run-dir", str(folder), "--steps", str(STEPS), *DEMOS[name])
    asked = parse_config(DemoConfig, "", options)
    had = DemoConfig.model_validate_json((folder / "demo.json").read_text()).replace(run_dir=str(folder))
    if had != asked:
        raise ConfigError.of("--made", str(folder), f"this run of the demo had other options than {' '.join(DEMOS[name])}")
    return summary_of(folder)


def grpo_options(folder: Path, **changes: Any) -> list[str]:
    """Options of ``examples.grpo`` for the demo's task, from a warm start next to ``folder``, made if missing."""
    config, shared = DemoConfig.model_validate({"steps": STEPS}), folder.parent / "shared"
    task, warm = shared / "task", shared / "warm_start" / "model"
    if not warm.exists():
        write_task(task, config.train.seed)
        with ray_session(1):
            warm_start(config, task, shared)
    settings = {**demo_settings(config, task, warm, folder), "run_dir": str(folder / "run"), "trace": False, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.json").write_text(json.dumps(settings | {"transport": "auto"}))
    return ["--config", str(folder / "options.json"), "--run-dir", str(folder / "run")]


def two_nodes(folder: Path) -> dict[str, Any]:
    """A rank on one Ray node and an engine on another, the driver on a third; weights go by gloo."""
    options = grpo_options(folder)
    with TwoNodes() as cluster:
        run = cluster.run("-m", "tests.support.cluster_run", *options, timeout=SECONDS)
        print(run.stdout)
        nodes = json.loads((folder / "run" / "nodes.json").read_text())
        used = [nodes["TrainWorker"], nodes["RolloutEngine"], nodes["driver"]]
    return {**summary_of(folder / "run"), "nodes_used": len({node for each in used for node in each})}


def ray_job(folder: Path) -> dict[str, Any]:
    """Submitted to a cluster of ``ray start --head`` that wants a token."""
    options = grpo_options(folder)
    with HeadNode(cpus=4) as head:
        submit = ("-m", "examples.ray_job", "--address", head.address, "--python", sys.executable)
        print(head.run(*submit, "--", "examples.grpo", *options, timeout=SECONDS).stdout)
    return summary_of(folder / "run")


def kl_to_reference(folder: Path) -> dict[str, Any]:
    """With a third model, the reference, and a KL to it in the loss."""
    options = grpo_options(folder, kl_coef=1e-3)
    subprocess.run((sys.executable, "-m", "examples.grpo", *options), check=True, timeout=SECONDS)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return {**summary_of(folder / "run"), "kl_coef": 1e-3, "kl_last_step": json.loads(lines[-1])["kl"]}


def summary_of(folder: Path) -> dict[str, Any]:
    return with_accuracies(json.loads((folder / "summary.json").read_text()))


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{name: partial(run_demo, options) for name, options in DEMOS.items()},
    "two_nodes": two_nodes,
    "ray_job": ray_job,
    "kl_to_reference": kl_to_reference,
}


def record(name: str, found: Mapping[str, Any]) -> None:
    runs = {**read_result("demo_runs").get("runs", {}), name: {**found, "machine": machine()}}
    least = min(run["accuracy_after"] for run in runs.values())
    gaps = {
        dtype: [run["max_log_prob_gap"] for run in runs.values() if dtype_of(run) == dtype] for dtype in LARGEST_ROUNDING
    }
    largest = {
        "max_log_prob_gap": max(gaps["float32"], default=None),
        "max_log_prob_gap_in_bfloat16": max(gaps["bfloat16"], default=None),
    }
    write_result("demo_runs", {"steps": STEPS, "least_accuracy_after": least, **largest, "runs": runs})


def dtype_of(run: Mapping[str, Any]) -> str:
    """The run's dtype. Summaries of loops without the demo do not name it: they compute in float32 on a CPU."""
    return str(run.get("computed_in", "float32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(RUNS), action="append", help="this run (may be given several times)")
    parser.add_argument(
        "--made", type=Path, metavar="FOLDER", help="record --only's run from FOLDER, where it was made before"
    )
    arguments = parser.parse_args()
    if arguments.made is not None:
        if arguments.only is None or len(arguments.only) > 1 or arguments.only[0] not in DEMOS:
            parser.error(f"--made is of one run: give --only once, one of {', '.join(DEMOS)}")
        record(arguments.only[0], made_demo(arguments.only[0], arguments.made))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or RUNS:
            started = time.perf_counter()
            found = RUNS[name](Path(folder) / name)
            record(name, found)
            seconds = time.perf_counter() - started
            print(f"{name}: {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
