"""Examples as jobs of a cluster that was started with ``ray start --head`` and a token."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_cluster import STEPS, assert_learned, options
from tests.support.clusters import HeadNode

SUBMIT = ("-m", "examples.ray_job")
FAILURE = (
    *("--", "timeit", "-n", "1", "-r", "1"),
    "import os; print('error: no such model', flush=True); os._exit(2)",
)
SLEEP = (
    *("--", "timeit", "-n", "1", "-r", "1"),
    "import my_plugin, os, time; print(os.environ['GREETING'], my_plugin.FOUND, flush=True); time.sleep(600)",
)


@pytest.fixture(scope="module")
def head() -> Iterator[HeadNode]:
    with HeadNode(cpus=4) as node:
        yield node


@pytest.mark.long
@pytest.mark.shows("cluster: examples.ray_job submits GRPO to a token-protected cluster, where it learns the demo task")
def test_a_submitted_job_learns_the_task(head: HeadNode, task: Path, warm_model: Path, tmp_path: Path) -> None:
    command = ["examples.grpo", *options(task, warm_model, tmp_path / "run")]
    run = head.run(*SUBMIT, "--address", head.address, "--python", _python(), "--", *command)
    assert run.returncode == 0, run.stdout
    assert_learned(json.loads((tmp_path / "run" / "summary.json").read_text()))
    assert f"step   {STEPS}/{STEPS}" in run.stdout
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.long
@pytest.mark.shows("cluster: a job with a wrong or missing token is refused in one line")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"RAY_AUTH_TOKEN": "0" * 64}, "the token found here is not this cluster's"),
        ({"RAY_AUTH_TOKEN": "", "RAY_AUTH_MODE": "", "HOME": "/nonexistent"}, "it wants a token, and none was found here"),
    ],
)
def test_a_job_without_the_right_token_is_refused(head: HeadNode, settings: dict[str, str], message: str) -> None:
    run = head.run(*SUBMIT, "--address", head.address, *SLEEP, **settings)
    assert run.returncode == 2
    assert run.stdout.startswith(f"error: {head.address} refused this client: {message}")
    assert run.stdout.count("\n") == 1


@pytest.mark.long
def test_the_exit_status_and_the_message_of_a_failed_job_reach_the_caller(head: HeadNode) -> None:
    run = head.run(*SUBMIT, "--address", head.address, "--python", _python(), *FAILURE)
    assert run.returncode == 2, run.stdout
    assert "error: no such model" in run.stdout
    assert " failed: Job entrypoint command failed with exit code 2" in run.stdout.splitlines()[-1]


@pytest.mark.long
def test_the_exit_status_and_the_message_of_a_failed_example_reach_the_caller(head: HeadNode, tmp_path: Path) -> None:
    command = ["examples.sft", "--model", "/no/such/model", "--dataset", "x.jsonl", "--run-dir", str(tmp_path / "run")]
    run = head.run(*SUBMIT, "--address", head.address, "--python", _python(), "--", *command)
    assert run.returncode == 2, run.stdout
    assert "error: --model='/no/such/model'" in run.stdout
    assert " failed: Job entrypoint command failed with exit code 2" in run.stdout.splitlines()[-1]


@pytest.mark.long
def test_a_job_finds_its_plugins_and_an_interrupt_stops_it(head: HeadNode, tmp_path: Path) -> None:
    plugin = tmp_path / "my_plugin"
    plugin.mkdir()
    (plugin / "__init__.py").write_text("FOUND = 'found'")
    sent = ("--plugins", str(plugin), "--environment", "GREETING=hello")
    process = head.python(*SUBMIT, "--address", head.address, "--python", _python(), *sent, *SLEEP)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "hello found":
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.splitlines()[-1].endswith("stopped")


def _python() -> str:
    return sys.executable
