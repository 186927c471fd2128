"""Where the metrics of a run's steps go, by name."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.run.folder import RunFolder
from actors.run.metrics import WRITERS, WriterFacts
from actors.run.start import RunStart
from examples.sft import SFTConfig
from rl_backend.contracts import BaseConfig, ConfigError

written: list[tuple[Any, ...]] = []


class Options(BaseConfig):
    steps: int = 3


class MyWriter:
    """A writer of a user's own."""

    def __init__(self, facts: WriterFacts) -> None:
        written.append(("made", facts.folder.name, dict(facts.options), facts.identity, facts.drop_from))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics.get("reward") == -1:
            raise ConnectionError("no network")
        written.append((step, dict(metrics)))

    def flush(self) -> None:
        written.append(("flushed",))

    def close(self) -> None:
        written.append(("closed",))


MINE = f"{__name__}:MyWriter"


@pytest.fixture(autouse=True)
def nothing_written() -> None:
    written.clear()


def test_a_writer_of_ones_own_is_told_of_every_step_beside_tensorboard(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", Options(), report_seconds=0, metrics_to=f"tensorboard, {MINE}") as folder:
        folder.log(1, {"reward": 0.5})
    made, *rest = written
    assert (made[:3], made[4]) == (("made", "run", {"steps": 3}), None)
    assert rest == [(1, {"reward": 0.5}), ("flushed",), ("closed",)]
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    written.clear()
    with RunFolder(tmp_path / "run", Options(), start=RunStart(replaces=True), report_seconds=0, metrics_to=MINE):
        pass
    assert written[0][4] == 0, "points of the steps that are taken again are to be dropped"


def test_a_run_may_have_no_writer(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Options(), report_seconds=0, metrics_to=None) as folder:
        folder.log(1, {"reward": 0.5})
    assert not (tmp_path / "tensorboard").exists()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward": 0.5}


def test_a_writer_that_fails_is_dropped_with_one_warning_and_the_run_continues(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Options(), report_seconds=0, metrics_to=MINE) as folder:
        with pytest.warns(UserWarning, match=r"metrics no longer go to .*MyWriter, ConnectionError: no network"):
            folder.log(1, {"reward": -1})
        folder.log(2, {"reward": 0.5})
    assert len(written) == 1
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "finished"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("nothing", "metrics_to='nothing': is none of tensorboard, wandb, mlflow, trackio"),
        ("tensorboard,mlflow", "metrics_to='mlflow': mlflow is not installed: pip install mlflow, or leave it out"),
        (f"{__name__}:NoSuchWriter", "NoSuchWriter': cannot be imported"),
        (
            "no_such_module:Writer",
            r"'no_such_module:Writer': cannot be imported \(No module .*\); give package.module:Class, or one of tensor",
        ),
    ],
)
def test_a_writer_that_is_not_there_is_refused_when_the_run_is_configured(
    names: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "mlflow" else find(name, *more))
    with pytest.raises(ConfigError, match=message):
        SFTConfig(model="m", dataset="d", metrics_to=names)


def test_a_writer_that_cannot_be_opened_ends_the_run_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MyWriter, facts: WriterFacts) -> None:
        raise PermissionError("no key")

    monkeypatch.setattr(MyWriter, "__init__", refuse)
    with pytest.raises(ConfigError, match=r"metrics_to=.*MyWriter': cannot be opened, PermissionError: no key"):
        RunFolder(tmp_path, Options(), report_seconds=0, metrics_to=MINE)
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_service_is_told_of_steps_as_its_package_wants_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that are not installed here are replaced by what they are documented to have."""
    calls: list[tuple[str, Any]] = []

    def record(called: str, answer: Any = None) -> Any:
        return lambda *given, **named: calls.append((called, given or named)) or answer

    service = {method: record(method) for method in ("init", "log", "finish", "log_params", "log_metrics", "end_run")}
    service["start_run"] = record("start_run", SimpleNamespace(info=SimpleNamespace(run_id="42")))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**service))  # type: ignore[misc]
    for resumed in (None, 3):
        writer = WRITERS[name](WriterFacts(tmp_path, {"steps": 3}, "0123456789abcdef", resumed))
        writer.write(2, {"reward": 0.5})
        writer.flush()
        writer.close()
    called = [method for method, _ in calls]
    if name == "mlflow":
        assert called == ["start_run", "log_params", "log_metrics", "end_run", "start_run", "log_metrics", "end_run"]
        assert [given["run_id"] for method, given in calls if method == "start_run"] == [None, "42"]
    else:
        assert called == ["init", "log", "finish"] * 2
        assert calls[0] == calls[3] and calls[0][1]["resume"] == "allow" and calls[0][1]["config"] == {"steps": 3}
    assert ("log" if name != "mlflow" else "log_metrics", ({"reward": 0.5},)) in calls


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_keeps_a_run_on_disk_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with RunFolder(tmp_path / "run", Options(), report_seconds=0, metrics_to="wandb") as folder:
        folder.log(1, {"reward": 0.5})
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
