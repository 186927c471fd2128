"""Examples as jobs of a cluster that was started with ``ray start --head`` and a token."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.test_cluster import STEPS, assert_learned, options
from tests.support.clusters import ROOT, HeadNode
from tests.support.runs import differences, outcome, steps_of

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


# As a scheduler would that submits a job again until it succeeds.
RETRIES = """
cd {root}
for attempt in 1 2 3; do
    {command} && exit 0
    echo "attempt $attempt ended with $?"
done
exit 1
"""


@pytest.mark.long
@pytest.mark.shows(
    "recovery: a Ray job with retries, whose driver is killed, resumes by itself and ends as the undisturbed run"
)
def test_a_job_with_retries_resumes_by_itself(head: HeadNode, task: Path, tmp_path: Path) -> None:
    files = {"model": task / "model", "dataset": task / "train.jsonl"}
    options = {**files, "steps": 40, "save-every": 5, "batch-size": 8, "ranks": 2, "lr": 1e-3, "metrics-to": "none"}

    def submit(folder: Path) -> subprocess.Popen[str]:
        command = [_python(), "-m", "examples.sft", "--run-dir", str(folder), "--resume", "auto"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        script = folder.with_suffix(".sh")
        script.write_text(RETRIES.format(root=ROOT, command=shlex.join(command)))
        return head.python("-m", "ray.scripts.scripts", "job", "submit", "--address", head.address, "--", "sh", str(script))

    job = submit(tmp_path / "killed")
    until(lambda: len(steps_of(tmp_path / "killed")) >= 12)
    (number,) = re.findall(r"process (\d+) on ", (tmp_path / "killed" / ".lock").read_text())
    os.kill(int(number), signal.SIGKILL)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output
    before, _, after = output.partition("attempt 1 ended with 137")
    assert "continuing after step" not in before and "attempt 2" not in after
    (step,) = re.findall(r"continuing after step (\d+), from", after)
    assert 5 <= int(step) < 40
    output, _ = (other := submit(tmp_path / "undisturbed")).communicate(timeout=300)
    assert other.returncode == 0, output
    assert not differences(outcome(tmp_path / "killed"), outcome(tmp_path / "undisturbed"))
    assert [line["step"] for line in steps_of(tmp_path / "killed")] == list(range(1, 41))


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _python() -> str:
    return sys.executable
