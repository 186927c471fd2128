"""A run whose start fails, one that had finished, and what the command says of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.run import run as run_module
from actors.run.command_line import run_command
from actors.run.run import Run
from actors.run.start import RunStart, find_start
from rl_backend.contracts import EngineDeadError, RLBackendError
from tests.unit.actors.run.test_start import config_of
from tests.unit.actors.run.test_start import run as take_steps


@pytest.mark.shows("runs: a start that fails leaves run.json and report.html, and the folder can be used again")
@pytest.mark.parametrize(
    ("error", "state"), [(RLBackendError("engine 0 did not start"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_start_that_fails_leaves_a_report_and_not_an_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, state: str
) -> None:
    @contextmanager
    def fails(*_: Any) -> Iterator[None]:
        raise error
        yield

    monkeypatch.setattr(run_module, "check_start", lambda *_, **__: None)
    monkeypatch.setattr(run_module, "open_session", fails)
    config = config_of(tmp_path, metrics_to=None)
    for _ in range(2):
        with pytest.raises(type(error)), Run(config):
            raise AssertionError("it began")
        facts = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (facts["state"], str(error) in facts["error"]) == (state, True)
        assert state in (tmp_path / "run" / "report.html").read_text()
        assert find_start(config) == find_start(config.replace(resume="auto")) == RunStart()


@pytest.mark.shows("resume: a run that had finished is a success that says so, with exit status 0")
@pytest.mark.parametrize("save_every", [0, 2])
def test_a_finished_run_that_is_resumed_is_a_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], save_every: int
) -> None:
    config = config_of(tmp_path, resume="auto", save_every=save_every)
    take_steps(config, last=10, finish=True)
    run_command(lambda: Run(config) and None)
    printed = capsys.readouterr()
    said = f"nothing left to do: the run in {tmp_path}/run has finished its 10 steps; raise steps to continue\n"
    assert (printed.out, printed.err) == (said, "")


def test_a_dead_engine_is_said_with_what_a_user_of_a_command_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise EngineDeadError("engine 0 is dead: its process ended; restart it")

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 2
    advice = "start the run again; --resume auto continues from its newest checkpoint"
    assert capsys.readouterr().err == f"error: engine 0 is dead: its process ended; {advice}\n"
