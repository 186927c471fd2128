"""Training ranks that die or hang while a run trains: others take their place, and the run is the one it would have been."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from actors.run.session import Session, open_session
from examples import sft
from rl_backend.contracts import GroupFailedError
from tests.support.runs import of_the_run

type Disturb = Callable[[Session], None]


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [of_the_run(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("recovery/")} for line in found]


def recoveries(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if name.startswith("recovery/")} for line in found if "recovery/count" in line]


def config_of(task: Path, folder: Path, **changes: Any) -> sft.SFTConfig:
    options = {"steps": 8, "batch_size": 8, "ranks": 2, "save_every": 3, "dtype": "float32", "metrics_to": "none"}
    files = {"model": str(task / "model"), "dataset": str(task / "train.jsonl"), "run_dir": str(folder)}
    return sft.SFTConfig(**{**options, **files, **changes})


def run(config: sft.SFTConfig, session: Session, disturb: Disturb | None = None, at: int = 5) -> Path:
    def on_step(step: int, metrics: dict[str, float]) -> None:
        if disturb is not None and step == at:
            # In the middle of the step that follows.
            threading.Timer(0.03, disturb, [session]).start()

    sft.train(config, session, on_step)
    return Path(config.run_dir)


def kill(rank: int, sign: signal.Signals = signal.SIGKILL) -> Disturb:
    return lambda session: os.kill(session.groups[0].ranks[rank].pid, sign)


def same_run(found: Path, expected: Path) -> None:
    assert lines(found) == lines(expected)
    (one,), (other,) = ([load_file(file) for file in (folder / "model").glob("*.safetensors")] for folder in (found, expected))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.shows("recovery: SFT on two ranks, one of them killed by kill -9 in a step, is the undisturbed run in every bit")
def test_a_run_goes_on_when_a_rank_is_killed(
    ray_cluster: None, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(task, tmp_path / "undisturbed")
    with open_session(config) as session:
        expected = run(config, session)
        policy_before, ranks = session.groups[0], session.groups[0].ranks
        found = run(config_of(task, tmp_path / "killed"), session, kill(1))
        assert session.groups[0] is policy_before and session.groups[0].epoch == 1
        assert {info.pid for info in session.groups[0].ranks}.isdisjoint(info.pid for info in ranks)
    same_run(found, expected)
    (told,) = recoveries(found)
    assert told["recovery/count"] == 1 and told["recovery/seconds_lost"] > 0
    # Since the checkpoint of step 3: that of step 6 is not committed yet.
    assert 2 <= told["recovery/steps_repeated"] <= 4
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "replaced" in line]
    assert line.startswith("warning: training group") and "died during operation" in line and "the run goes on" in line
