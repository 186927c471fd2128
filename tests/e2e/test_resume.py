"""Runs that are killed with all of their processes and go on: every step is the one of a run that was left alone."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import ray

from actors.folder.resume import checkpoints_of
from actors.run import RunResult
from actors.run.session import Session, open_session
from examples import grpo, ppo, sft
from examples.demo.__main__ import DemoConfig, demo_settings
from tests.e2e.conftest import LEARNED_STEPS
from tests.support.clusters import ROOT
from tests.support.runs import differences, of_the_run

START_SECONDS = 150.0


class StopEarlyError(Exception):
    """Ends a run from its callback: the schedule depends on the number of steps, so that stays."""


def stop_after(last: int) -> Any:
    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == last:
            raise StopEarlyError

    return on_step


def kill_after_a_checkpoint(module: str, options: dict[str, Any], folder: Path) -> None:
    """Runs an example in a process group of its own and kills all of it, at some moment after its first checkpoint."""
    (folder / "options.json").write_text(json.dumps(options))
    free = ray.available_resources().get("CPU", 0)
    with (folder / "output").open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(folder / "options.json")],
            env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not (Path(options["run_dir"]) / "checkpoints" / "latest").exists():
                assert driver.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
                time.sleep(0.02)
            time.sleep(random.uniform(0, 1))
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    deadline = time.monotonic() + START_SECONDS
    while ray.available_resources().get("CPU", 0) < free:
        assert time.monotonic() < deadline, "Ray has not ended the actors of the killed run"
        time.sleep(0.1)


def lines(path: Path, last: int) -> list[dict[str, Any]]:
    """Up to a step, without what the machine decides."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [of_the_run(line) for line in found if line["step"] <= last]


def differences_until(last: int, run: Path, reference: Path) -> list[str]:
    """Which of two engines answers what is chance, and rounds their log-probs."""
    files = ("metrics.jsonl", "samples.jsonl", "held_out.jsonl")
    found, wanted = ({name: lines(folder / name, last) for name in files} for folder in (run, reference))
    assert all(found.values())
    return differences(found, wanted)


@pytest.mark.long
@pytest.mark.shows("resume: SFT killed by kill -9 and resumed has the losses of an uninterrupted run, in every digit")
def test_a_killed_sft_run_goes_on_as_if_it_had_not_been(warm_model: Path, tmp_path: Path) -> None:
    last, reference = 40, warm_model.parent
    settings = json.loads((reference / "config.json").read_text())
    settings |= {"run_dir": str(tmp_path / "run"), "save_every": 8, "resume": "auto"}
    kill_after_a_checkpoint("examples.sft", settings, tmp_path)
    config = sft.SFTConfig(**settings)
    assert checkpoints_of(config).steps()
    with pytest.raises(StopEarlyError):
        sft.train(config, on_step=stop_after(last))
    assert lines(tmp_path / "run" / "metrics.jsonl", last) == lines(reference / "metrics.jsonl", last)


@pytest.mark.shows("loop: one seed gives the same rewards twice")
@pytest.mark.shows(
    "resume: GRPO killed by kill -9 and resumed draws the samples of an uninterrupted run, and learns the same"
)
def test_a_killed_grpo_run_goes_on_as_if_it_had_not_been(
    learned: tuple[RunResult, Path], demo_session: Session, tmp_path: Path
) -> None:
    last, reference = 6, learned[1]
    settings = json.loads((reference / "config.json").read_text())
    settings |= {"run_dir": str(tmp_path / "run"), "save_every": 2, "resume": "auto", "trace": False}
    # One engine starts sooner than the two that go on.
    one_engine = {"rollout": settings["rollout"] | {"num_engines": 1}}
    kill_after_a_checkpoint("examples.grpo", settings | one_engine, tmp_path)
    config = grpo.GRPOConfig(**settings)
    assert checkpoints_of(config).steps()
    with pytest.raises(StopEarlyError):
        grpo.train(config, demo_session, stop_after(last))
    assert differences_until(last, tmp_path / "run", reference) == []


def stop_in_a_step(module: str, options: dict[str, Any], folder: Path, number: int) -> str:
    """Runs an example with a Ray of its own and sends a signal to its process group in a step, as a terminal does."""
    (folder / "options.json").write_text(json.dumps(options))
    with subprocess.Popen(
        [sys.executable, "-u", "-m", module, "--config", str(folder / "options.json")],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as driver:
        try:
            assert driver.stdout is not None
            output = ""
            for line in driver.stdout:
                output += line
                if line.startswith("step    1/"):
                    os.killpg(driver.pid, number)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 128 + number, output
    return output


@pytest.mark.long
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
@pytest.mark.shows(
    "resume: GRPO stopped by Ctrl-C or SIGTERM to its whole process group, as from a terminal, finishes its step and "
    "continues as if it had not been; make test-all sends Ctrl-C"
)
def test_a_grpo_run_whose_group_was_stopped_goes_on_as_if_it_had_not_been(
    learned: tuple[RunResult, Path], demo_session: Session, tmp_path: Path, number: int, reason: str
) -> None:
    last, reference = 8, learned[1]
    settings = json.loads((reference / "config.json").read_text())
    settings |= {"run_dir": str(tmp_path / "run"), "save_every": 1000, "resume": "auto", "trace": False}
    output = stop_in_a_step("examples.grpo", settings, tmp_path, number)
    config = grpo.GRPOConfig(**settings)
    (step,) = checkpoints_of(config).steps()
    assert 1 <= step < last and f"ended by {reason} after step {step} of {LEARNED_STEPS}, with a checkpoint" in output
    for phase in ("data", "ray", "ranks", "engines", "model", "push", "held-out"):
        assert re.search(rf"^ *\d+\.\d s  {phase} .*: \d+\.\d s$", output, re.MULTILINE), phase
    with pytest.raises(StopEarlyError):
        grpo.train(config, demo_session, stop_after(last))
    assert differences_until(last, tmp_path / "run", reference) == []


@pytest.mark.long
@pytest.mark.shows(
    "resume: PPO, and GRPO and PPO on the bridge, continue after kill -9 as if they had not been killed; make test-all runs "
    "PPO on the bridge"
)
@pytest.mark.parametrize(("algorithm", "backend"), [("ppo", "native"), ("grpo", "bridge"), ("ppo", "bridge")])
def test_a_killed_run_of_either_runtime_goes_on_as_if_it_had_not_been(
    task: Path, warm_model: Path, tmp_path: Path, algorithm: Literal["grpo", "ppo"], backend: Literal["native", "bridge"]
) -> None:
    last = 6
    demo = DemoConfig(algorithm=algorithm, backend=backend, steps=LEARNED_STEPS, trace=False)
    module: Any = {"grpo": grpo, "ppo": ppo}[algorithm]
    kind: Any = {"grpo": grpo.GRPOConfig, "ppo": ppo.PPOConfig}[algorithm]
    settings = demo_settings(demo, task, warm_model, tmp_path)
    if algorithm == "ppo":
        settings |= {"critic_lr": 1e-3, "kl_coef": 1e-3}
    settings["run_dir"] = str(tmp_path / "reference")
    with open_session(kind(**settings)) as session:
        with pytest.raises(StopEarlyError):
            module.train(kind(**settings), session, stop_after(last))
        settings |= {"run_dir": str(tmp_path / "run"), "save_every": 2, "resume": "auto"}
        kill_after_a_checkpoint(f"examples.{algorithm}", settings, tmp_path)
        config = kind(**settings)
        assert 0 < max(checkpoints_of(config).steps()) < last
        with pytest.raises(StopEarlyError):
            module.train(config, session, stop_after(last))
    assert differences_until(last, tmp_path / "run", tmp_path / "reference") == []
