"""Runs over two Ray nodes of this machine; the driver is on a third, which has no CPUs."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import TwoNodes
from tests.support.runs import steps_of

STEPS, SPREAD_STEPS = 10, 16
"""Of a run that compares with its own beginning, and of one that compares with ``MOST_BEFORE``."""
LOST_SECONDS = 30.0
MOST_BEFORE = 0.6
"""Held-out reward of the warm start at most, as the test of the demo has it."""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    with TwoNodes() as cluster:
        yield cluster


def options(task: Path, model: Path, run_dir: Path, **changes: Any) -> list[str]:
    """Options of ``examples.grpo`` that learn the demo's task in ``STEPS`` steps."""
    values = {
        "model": model,
        "dataset": task / "train.jsonl",
        "eval-dataset": task / "held_out.jsonl",
        "reward": "examples.demo.task:compute_score",
        "run-dir": run_dir,
        "steps": STEPS,
        "max-prompt-tokens": 8,
        "max-response-tokens": 8,
        "lr": 3e-4,
        "lr-warmup-steps": 2,
        **changes,
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def assert_learned(summary: dict[str, Any]) -> None:
    assert summary["held_out_reward_after"] >= summary["held_out_reward_before"] + 0.15
    assert summary["max_log_prob_gap"] <= 1e-5


@pytest.mark.long
@pytest.mark.shows("cluster: GRPO learns the demo task with training on one Ray node, vLLM on another, weights by gloo")
def test_training_on_one_node_and_sampling_on_another_learns_the_task(
    two_nodes: TwoNodes, task: Path, warm_model: Path, tmp_path: Path
) -> None:
    run = two_nodes.run("-m", "tests.support.cluster_run", *options(task, warm_model, tmp_path / "run"))
    assert run.returncode == 0, run.stdout
    assert_learned(json.loads((tmp_path / "run" / "summary.json").read_text()))
    nodes = json.loads((tmp_path / "run" / "nodes.json").read_text())
    assert sorted(nodes["TrainWorker"] + nodes["RolloutEngine"]) == sorted(two_nodes.nodes)
    assert nodes["driver"][0] not in two_nodes.nodes
    assert "weights by gloo" in run.stdout


@pytest.fixture(scope="module")
def spread_run(
    two_nodes: TwoNodes, task: Path, warm_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run with a rank on each node that goes on and on, after ``SPREAD_STEPS`` steps and an evaluation."""
    run_dir = tmp_path_factory.mktemp("spread") / "run"
    changes = {"ranks": 2, "placement": "spread", "steps": 10**6, "eval-every": SPREAD_STEPS}
    endless = options(task, warm_model, run_dir, **changes)
    process = two_nodes.python("-m", "tests.support.cluster_run", *endless)
    try:
        deadline = time.monotonic() + 120
        while len(steps_of(run_dir)) < SPREAD_STEPS:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, steps_of(run_dir)
            time.sleep(0.2)
        yield process, run_dir
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
@pytest.mark.shows("cluster: with placement=spread two training ranks take a node each, and learn the task")
def test_ranks_that_are_spread_over_two_nodes_learn_the_task(
    two_nodes: TwoNodes, spread_run: tuple[subprocess.Popen[str], Path]
) -> None:
    _, run_dir = spread_run
    metrics = steps_of(run_dir)[:SPREAD_STEPS]
    assert max(step["log_prob_gap"] for step in metrics) <= 1e-5
    assert metrics[-1]["held_out_reward"] >= MOST_BEFORE + 0.15
    nodes = json.loads((run_dir / "nodes.json").read_text())
    assert sorted(nodes["TrainWorker"]) == sorted(two_nodes.nodes)


@pytest.mark.long
@pytest.mark.shows("cluster: a run that loses a node ends within seconds with an error that says what died")
def test_a_run_that_loses_a_node_ends_and_says_so(
    two_nodes: TwoNodes, spread_run: tuple[subprocess.Popen[str], Path]
) -> None:
    """The last test of this module: the cluster has one node afterwards."""
    process, _ = spread_run
    two_nodes.remove_last_node()
    removed = time.monotonic()
    output, _ = process.communicate(timeout=LOST_SECONDS)
    assert time.monotonic() - removed < LOST_SECONDS
    assert process.returncode == 2, output
    last = output.splitlines()[-1]
    assert re.search(r"^error: (training group '[\w-]+': rank \d .* died|engine 0 is dead)", last), output
    assert "Traceback" not in output
