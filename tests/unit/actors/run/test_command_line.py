"""Exit statuses of commands, and what they print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.session import RunStopped, RunTerminated
from actors.folder.checkpoints import RunCheckpoints
from actors.folder.resume import RunFinishedError
from actors.run import command_line
from actors.run.command_line import run_command
from actors.train.outcome import AFTERWARDS
from rl_backend.contracts import (
    BaseConfig,
    ClusterLostError,
    ConfigError,
    EngineDeadError,
    GroupFailedError,
    RLBackendError,
)


class Mine(BaseConfig):
    run_dir: str = "x"


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py"])


def ended(error: BaseException) -> int | None:
    def main(config: Mine) -> None:
        assert config == Mine()
        raise error

    try:
        run_command(main, Mine)
    except SystemExit as end:
        return int(str(end.code))
    return None


@pytest.mark.parametrize(
    ("error", "status", "out", "err"),
    [
        (RunFinishedError("the run is done"), None, "nothing left to do: the run is done\n", ""),
        (ConfigError.of("Mine.run_dir", "x", "is used"), 2, "", "error: --run-dir='x': is used\n"),
        (RLBackendError("engine: restart it"), 2, "", "error: engine: restart it\n"),
        (EngineDeadError("dead; restart it"), 2, "", f"error: dead; {command_line.RUN_AGAIN}\n"),
        (GroupFailedError(f"died; {AFTERWARDS}"), 2, "", f"error: died; {command_line.RUN_AGAIN}\n"),
        (
            ModuleNotFoundError("no", name="datasets"),
            2,
            "",
            "error: the package datasets is not installed: pip install datasets\n",
        ),
        (RunTerminated("after step 3"), 143, "", "stopped by SIGTERM\n"),
        (RunStopped("Ctrl-C after step 3"), 130, "", "stopped\n"),
        (KeyboardInterrupt(), 130, "", "stopped\n"),
    ],
)
def test_a_command_ends_with_one_message_and_its_status(
    error: BaseException, status: int | None, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(error) == status
    assert tuple(capsys.readouterr()) == (out, err)
    for mistake in (ZeroDivisionError(), ModuleNotFoundError("no", name="actors.none")):
        with pytest.raises(type(mistake)):
            ended(mistake)


def test_a_checkpoint_is_spoken_of_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for steps, more in ((set(), ""), ({4}, "; --resume auto continues from its newest checkpoint")):
        monkeypatch.setattr(
            RunCheckpoints, "steps", lambda self, steps=steps: steps if self.root.parent.name == "x" else {1}
        )
        assert ended(EngineDeadError("dead; restart it")) == 2
        assert capsys.readouterr().err == f"error: dead; start the run again{more}\n"


def test_notes_of_an_error_are_a_part_of_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    error = RLBackendError("first")
    error.add_note("second")
    error.add_note("third")
    assert ended(error) == 2 and capsys.readouterr().err == "error: first; second; third\n"


@pytest.mark.parametrize(
    ("error", "lost", "status"),
    [
        (ClusterLostError("Ray is lost"), None, 2),
        (RunTerminated(), ClusterLostError("gone"), 143),
        (KeyboardInterrupt(), ClusterLostError("gone"), 130),
        (RLBackendError("mine"), ClusterLostError("gone"), None),
    ],
)
def test_where_ray_is_lost_its_exit_handlers_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, lost: Any, status: int | None
) -> None:
    class Left(BaseException):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(command_line, "cluster_loss", lambda: lost)
    if status is None:
        assert ended(error) == 2
        return
    with pytest.raises(Left) as left:
        ended(error)
    assert left.value.args == (status,)


def test_a_command_of_your_own_needs_no_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--its-own"])

    def refuses() -> None:
        raise ConfigError.of("Mine.run_dir", "x", "is used")

    with pytest.raises(SystemExit):
        run_command(refuses)
    assert capsys.readouterr().err == "error: Mine.run_dir='x': is used\n"


def test_options_are_read_before_the_command_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mine.py", "--run-dir", "here"])
    found: list[Mine] = []
    run_command(found.append, Mine)
    assert found == [Mine(run_dir="here")]
    monkeypatch.setattr(sys, "argv", ["mine.py", "--run-dri", "here"])
    with pytest.raises(SystemExit) as end:
        run_command(found.append, Mine)
    assert (end.value.code, len(found)) == (2, 1)
    assert capsys.readouterr().err == "error: --run-dri: there is no such flag; did you mean --run-dir?\n"
