"""SIGTERM and one Ctrl-C end a run after the step that it is in, with a checkpoint from which it continues."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors import Run, Session
from actors.cluster.session import RunStopped, RunTerminated
from actors.run import stop as stop_module
from actors.run.stop import StopRequest
from actors.train.model import GroupModel, Update
from examples import sft
from rl_backend.contracts import Metric
from tests.support.clusters import ROOT
from tests.support.stopped_run import STEPS, Weight, config_of, train


def at_step(wanted: int, *signals: int, pause: float = 0.0) -> Callable[[int], None]:
    """Sends the signals to this process in the middle of a step."""

    def during(step: int) -> None:
        if step == wanted:
            for number in signals:
                os.kill(os.getpid(), number)
                time.sleep(pause)

    return during


def state(folder: Path) -> tuple[str, str]:
    facts = json.loads((folder / "run" / "run.json").read_text())
    return facts["state"], facts["error"]


def logged(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["weight"]) for line in map(json.loads, lines)]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("number", "kind", "reason"), [(signal.SIGTERM, RunTerminated, "SIGTERM"), (signal.SIGINT, RunStopped, "Ctrl-C")]
)
@pytest.mark.parametrize("save_every", [3, 5, 100])
@pytest.mark.shows(
    "failures: SIGTERM or one Ctrl-C ends a run after its step, with a checkpoint; resumed, it has the numbers of an "
    "uninterrupted run"
)
def test_a_run_that_is_stopped_continues_as_if_it_had_not_been(
    tmp_path: Path,
    tied_model: Path,
    number: int,
    kind: type[BaseException],
    reason: str,
    save_every: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    alone.mkdir()
    stopped.mkdir()
    weight = train(config_of(alone, tied_model, save_every=save_every))
    config = config_of(stopped, tied_model, save_every=save_every)
    for step in (2, 5):
        before = signal.getsignal(number)
        with pytest.raises(kind):
            train(config, at_step(step, number))
        assert signal.getsignal(number) == before
        assert [each for each, _ in logged(stopped)] == list(range(1, step + 1))
        assert checkpoints(stopped)[-1] == f"step-0000000{step}"
        how = (
            f"{reason} after step {step} of {STEPS}, with a checkpoint: continue with --resume auto, from step-0000000{step}"
        )
        assert state(stopped) == ("interrupted", how)
        output = capfd.readouterr()
        assert f"\n{reason}: the run ends when this step is done and its checkpoint is committed" in output.err
        assert output.out.endswith(f"ended by {how}\n")
    assert train(config) == weight
    assert logged(stopped) == logged(alone)
    assert state(stopped) == ("finished", None)


def test_a_run_without_checkpoints_ends_in_order_and_says_so(
    tmp_path: Path, tied_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunStopped):
        train(config_of(tmp_path, tied_model), at_step(2, signal.SIGINT))
    how = f"Ctrl-C after step 2 of {STEPS}, without a checkpoint (save_every=0)"
    assert state(tmp_path) == ("interrupted", how)
    assert [step for step, _ in logged(tmp_path)] == [1, 2]
    output = capfd.readouterr()
    assert "Ctrl-C: the run ends when this step is done without a checkpoint (save_every=0); Ctrl-C again" in output.err
    assert output.out.endswith(f"ended by {how}\n")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.shows("resume: a run that ended after its last checkpoint, before its results, has those of its last step")
def test_sft_that_is_resumed_after_its_last_step_has_the_results_of_it(
    tmp_path: Path, tied_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Trained(GroupModel):
        def update(self, *_: Any) -> Update:
            value = self.group.update(1)  # type: ignore[attr-defined]
            return Update({"nll": Metric(value, 1.0), "odd": Metric(math.nan, 1.0)}, True, 1.0, 1e-5)

    class Empty(list[list[Any]]):
        note = ""

    held_out = Empty([[]])
    held_out.note = "1 of 2 examples is too long: filtered"
    monkeypatch.setattr(sft, "load_data", lambda config: (Empty([[]]), held_out))
    monkeypatch.setattr(Run, "build_model", lambda self, name: Trained(self.session.groups[0], SimpleNamespace(name=name)))  # type: ignore[arg-type]
    config = config_of(tmp_path, tied_model, save_every=100, batch_size=1)

    def fail(step: int, metrics: dict[str, float]) -> None:
        if step == STEPS:
            raise ConnectionError("the machine is lost")

    with pytest.raises(ConnectionError):
        sft.train(config, Session([Weight(config)]), fail)  # type: ignore[list-item]
    assert checkpoints(tmp_path) == [f"step-{STEPS:08d}"] and not (tmp_path / "run" / "summary.json").exists()
    group: Any = Weight(config)
    sft.train(config, Session([group]))
    assert f"held out: {held_out.note}," in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["nll"], summary["odd"], summary["step_ok"]) == (group.value, "NaN", 1.0)


def test_a_run_in_its_last_step_finishes(tmp_path: Path, tied_model: Path) -> None:
    train(config_of(tmp_path, tied_model, save_every=100), at_step(STEPS, signal.SIGTERM))
    assert state(tmp_path) == ("finished", None)
    assert checkpoints(tmp_path) == [f"step-0000000{STEPS}"]


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_second_ctrl_c_ends_a_run_at_once(
    tmp_path: Path, tied_model: Path, save_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stop_module._SAME_SECONDS, signal.SIGINT, 0.01)
    with pytest.raises(KeyboardInterrupt) as raised:
        train(config_of(tmp_path, tied_model, save_every=save_every), at_step(2, signal.SIGINT, signal.SIGINT, pause=0.02))
    assert not isinstance(raised.value, RunStopped)
    assert [step for step, _ in logged(tmp_path)] == [1]
    assert state(tmp_path) == ("interrupted", "KeyboardInterrupt")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_program_around_the_run_passes_on_as_well_is_one(
    tmp_path: Path, tied_model: Path, number: int
) -> None:
    with pytest.raises(RunStopped):
        train(config_of(tmp_path, tied_model, save_every=100), at_step(2, number, number))
    assert checkpoints(tmp_path) == ["step-00000002"]


def test_a_scheduler_that_insists_ends_a_run_at_once(
    tmp_path: Path, tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stop_module._SAME_SECONDS, signal.SIGTERM, 0.01)
    with pytest.raises(RunTerminated):
        train(config_of(tmp_path, tied_model, save_every=100), at_step(2, signal.SIGTERM, signal.SIGTERM, pause=0.02))
    assert state(tmp_path) == ("interrupted", "SIGTERM")
    assert checkpoints(tmp_path) == []


def test_a_step_that_fails_after_the_signal_is_an_interrupted_one(tmp_path: Path, tied_model: Path) -> None:
    def lose_a_rank(step: int) -> None:
        at_step(2, signal.SIGTERM)(step)
        if step == 2:
            raise OSError("rank 0 is gone")

    with pytest.raises(RunTerminated) as raised:
        train(config_of(tmp_path, tied_model, save_every=1), lose_a_rank)
    assert isinstance(raised.value.__cause__, OSError)
    assert state(tmp_path) == ("interrupted", "SIGTERM before the step was finished: OSError: rank 0 is gone")
    assert checkpoints(tmp_path) == ["step-00000001"]


def test_an_error_without_a_signal_stays_what_it_is(tmp_path: Path, tied_model: Path) -> None:
    def fail(step: int) -> None:
        raise OSError("rank 0 is gone")

    with pytest.raises(OSError, match="rank 0 is gone"):
        train(config_of(tmp_path, tied_model), fail)
    assert state(tmp_path) == ("failed", "OSError: rank 0 is gone")


def test_runs_of_several_threads_end_by_one_request(tmp_path: Path, tied_model: Path) -> None:
    stop = StopRequest()
    ended: dict[str, BaseException] = {}
    both = threading.Barrier(2)

    def run(name: str) -> None:
        (tmp_path / name).mkdir()

        def during(step: int) -> None:
            if step == 2:
                both.wait(30)
                stop.ask("SIGTERM")

        try:
            train(config_of(tmp_path / name, tied_model, save_every=100), during, stop=stop)
        except BaseException as error:  # noqa: BLE001, looked at below
            ended[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in ("ann", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: type(error) for name, error in ended.items()} == {"ann": RunTerminated, "bob": RunTerminated}
    assert [checkpoints(tmp_path / name) for name in ended] == [["step-00000002"]] * 2


@pytest.mark.parametrize(
    ("number", "status", "last"),
    [pytest.param(signal.SIGTERM, 143, "stopped by SIGTERM", marks=pytest.mark.long), (signal.SIGINT, 130, "stopped")],
)
def test_the_exit_status_says_what_ended_a_run(
    tmp_path: Path, tied_model: Path, number: int, status: int, last: str
) -> None:
    command: list[Any] = [sys.executable, "-m", "tests.support.stopped_run", tmp_path, tied_model, "100"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert "works\n" in iter(run.stdout.readline, "")
            run.send_signal(number)
            output, errors = run.communicate(timeout=120)
        finally:
            run.kill()
    assert run.returncode == status, errors
    assert errors.rstrip().splitlines()[-1] == last
    assert output.splitlines()[-1].endswith("from step-00000002")
    assert checkpoints(tmp_path) == ["step-00000002"]
