"""The wheel's examples, copied next to a user's own code in a folder elsewhere, and a session that runs share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import Session
from actors.run import RunResult
from examples import grpo
from examples.demo.__main__ import DemoConfig, demo_settings
from rl_backend.contracts import ConfigError
from tests.support.runs import differences, of_the_run
from tests.unit.tree.test_packaging import copy_sources

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


async def length(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": -len(solution_str), "digits": sum(map(str.isdigit, solution_str)), "said": solution_str}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as pip installs it, without what it needs."""
    folder = tmp_path_factory.mktemp("installed")
    source = copy_sources(folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(source)], check=True)
    shutil.rmtree(source)
    return folder / "site"


def run(installed: Path, folder: Path, *command: str) -> str:
    """Runs Python in ``folder``, where nothing of this source tree can be imported, and Ray and vLLM as they come."""
    ours = ("RAY_ADDRESS", "RAY_prestart_worker_first_driver", "RAY_worker_niceness", "TORCH_COMPILE_DISABLE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.shows(
    "examples: a file that pip installed, copied next to a user's reward function, trains in a folder elsewhere"
)
@pytest.mark.long
def test_a_copied_example_runs_against_the_installed_package(
    installed: Path, task: Path, warm_model: Path, tmp_path: Path
) -> None:
    listed = run(installed, tmp_path, "-m", "rl_backend.cli", "example")
    files = {line.split()[0]: Path(line.rsplit(": ", 1)[1]) for line in listed.splitlines()}
    assert set(files) == {"episodes", "eval", "grpo", "ppo", "recipes", "sft", "tenants"}
    assert all(file.is_relative_to(installed) for file in files.values())
    shutil.copy(files["grpo"], tmp_path / "my_loop.py")
    (tmp_path / "my_reward.py").write_text(REWARD)
    settings = demo_settings(DemoConfig(steps=2), task, warm_model, tmp_path)
    rewards = {"right": "my_reward.py:score", "length": {"function": "my_reward.py:length", "weight": 0}}
    settings |= {"reward": rewards, "reward_processes": True, "reward_timeout_seconds": 60, "on_reward_failure": "drop"}
    settings |= {"run_dir": "run", "trace": False}
    (tmp_path / "options.json").write_text(json.dumps(settings))
    run(installed, tmp_path, "my_loop.py", "--config", "options.json")
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl", 2)] == [0, 1, 2]
    last = lines(tmp_path / "run" / "metrics.jsonl", 2)[-1]
    assert last["reward"] == last["reward/right"] and last["reward/length"] < 0 < last["reward/length/digits"]
    assert (last["reward_failures"], last["groups_dropped"]) == (0, 0)
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["reward_info"]["right"] == {"score": sample["reward"]}
    assert sample["response"].startswith(sample["reward_info"]["length"]["said"])
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


@pytest.mark.long
def test_the_command_runs_an_example_that_pip_installed(installed: Path, task: Path, tmp_path: Path) -> None:
    options = ["--model", str(task / "model"), "--dataset", str(task / "train.jsonl"), "--run-dir", "run", "--steps", "2"]
    printed = run(installed, tmp_path, "-m", "rl_backend.cli", "sft", *options)
    assert "run folder: run (report.html, summary.json, trained model in " in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["nll"] > 0 and summary["seconds"] > 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "finished"
    assert (tmp_path / "run" / "model" / "config.json").exists()


def lines(path: Path, last: int) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [of_the_run(line) for line in found if line["step"] <= last]


class StopError(Exception):
    """Ends a run whose schedule depends on the number of its steps."""


def stop_after(last: int) -> Any:
    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == last:
            raise StopError

    return on_step


@pytest.mark.long
@pytest.mark.shows("loop: runs that share Ray, trainer and engines match runs that start their own, in every digit")
def test_a_run_in_a_session_that_is_open_is_the_run_that_opens_its_own(
    learned: tuple[RunResult, Path], demo_session: Session, tmp_path: Path
) -> None:
    """``learned`` is a run of this session, which may have had others before."""
    last, reference = 3, learned[1]
    settings = json.loads((reference / "config.json").read_text()) | {"trace": False}
    config = grpo.GRPOConfig(**settings)
    for name, session in (("own", None), ("shared", demo_session)):
        with pytest.raises(StopError):
            grpo.train(config.replace(run_dir=str(tmp_path / name)), session, stop_after(last))
        assert ray.is_initialized() and demo_session.rollout is not None
        files = ("metrics.jsonl", "samples.jsonl", "held_out.jsonl")
        found, wanted = ({file: lines(folder / file, last) for file in files} for folder in (tmp_path / name, reference))
        assert differences(found, wanted) == []
    for changes, message in (
        ({"ranks": 2}, "ranks=1.*the run asks for ranks=2"),
        ({"dtype": "bfloat16"}, "param_dtype='float32'.*the run asks for .*param_dtype='bfloat16'"),
        ({"seed": 1}, "seed=0.*the run asks for seed=1"),
        ({"max_response_tokens": 9}, "max_model_len=16.*asks for max_model_len=17"),
    ):
        other = config.replace(run_dir=str(tmp_path / "other"), **changes)
        with pytest.raises(ConfigError, match=message):
            grpo.train(other, demo_session)
