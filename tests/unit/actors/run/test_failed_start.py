"""A run whose start fails, one that had finished, and what the command says of both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.checks import preflight as checks
from actors.folder.resume import RunStart, find_start
from actors.options.config import TrainingConfig
from actors.run import run as run_module
from actors.run.command_line import run_command
from actors.run.run import Run
from examples import tenants
from rl_backend.contracts import ConfigError, EngineDeadError, RLBackendError
from tests.unit.actors.folder.test_resume import config_of
from tests.unit.actors.folder.test_resume import run as take_steps


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

    monkeypatch.setattr(run_module, "check_start", lambda *_, **__: [])
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


class SessionOpened(Exception):  # noqa: N818, no error
    """Ends a run where it would start Ray."""


@pytest.mark.shows("resume: users who have finished are passed over; where all have, nothing is started and it is a success")
def test_users_who_have_finished_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[str] = []

    def opens(*_: Any) -> None:
        raise SessionOpened

    def finds(config: TrainingConfig) -> RunStart:
        found.append(Path(config.run_dir).name)
        return find_start(config)

    monkeypatch.setattr(tenants, "open_session", opens)
    monkeypatch.setattr(checks, "CHECKS", [check for check in checks.CHECKS if check.name == "run folder"])
    monkeypatch.setattr(checks, "find_start", finds)
    shared = config_of(tmp_path, resume="auto").model_dump(include={"steps", "save_every", "resume"})
    files = {"model": f"{tmp_path}/m", "dataset": f"{tmp_path}/train.jsonl", "reward": f"{tmp_path}/reward.py:score"}
    users: dict[str, dict[str, Any]] = {"ann": {}, "bob": {"lr": 1e-3}}
    config = tenants.TenantsConfig(**shared, **files, run_dir=str(tmp_path / "users"), users=users)  # type: ignore[arg-type]
    for user in config.runs().values():
        take_steps(user, last=10, finish=True)  # type: ignore[arg-type]
    run_command(lambda: tenants.train(config) and None)
    said = f"nothing left to do: all users' runs in {tmp_path}/users have finished; raise steps, or a user's, to continue\n"
    assert (*capsys.readouterr(), found) == (said, "", ["ann", "bob"])
    with pytest.raises(SessionOpened):
        tenants.train(config.replace(users={"ann": {}, "bob": {"lr": 1e-3, "steps": 12}}))
    assert found == ["ann", "bob"] * 2  # once for each
    with pytest.raises(ConfigError, match=r"UserConfig\.lr=0\.1: the run of .*ann"):
        tenants.train(config.replace(users={"ann": {"lr": 0.1}}))


@pytest.mark.shows("runs: where the runs of several users end, the error has all of them")
def test_all_users_whose_runs_ended_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(name: str, *_: Any) -> None:
        if name != "ann":
            raise RLBackendError(f"no prompts for {name}")

    monkeypatch.setattr(tenants, "has_steps_left", lambda *_: True)
    monkeypatch.setattr(tenants, "train_user", fails)
    monkeypatch.setattr(tenants, "write_report", lambda _: None)
    files = {"model": f"{tmp_path}/m", "dataset": f"{tmp_path}/train.jsonl", "reward": f"{tmp_path}/reward.py:score"}
    config = tenants.TenantsConfig(**files, steps=3, run_dir=str(tmp_path), users={"ann": {}, "bob": {}, "eve": {}})  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        run_command(lambda: tenants.train(config, object()) and None)  # type: ignore[arg-type]
    said = "no prompts for bob; this ended the run of user 'bob'"
    said += "; this ended the run of user 'eve': no prompts for eve"
    printed = capsys.readouterr()
    assert printed.err == f"error: {said}\n"
    told = [f"{name:12}warning: this user's run has ended: no prompts for {name}" for name in ("bob", "eve")]
    assert sorted(printed.out.splitlines()) == told, "at once, before the others have finished"


def test_a_dead_engine_is_said_with_what_a_user_of_a_command_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise EngineDeadError("engine 0 is dead: its process ended; restart it")

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 2
    advice = "start the run again"
    assert capsys.readouterr().err == f"error: engine 0 is dead: its process ended; {advice}\n"
