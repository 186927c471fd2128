"""Where the metrics of a run's steps go, by name."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.folder.folder import RunFolder
from actors.folder.resume import RunStart, find_start
from actors.watch.metrics import WRITERS, WriterFacts
from examples.sft import SFTConfig
from rl_backend.contracts import BaseConfig, ConfigError
from tests.unit.actors.folder.test_resume import config_of, run

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


@pytest.mark.shows("runs: the curves of a run that continues keep the step that it continues from, and have each step once")
@pytest.mark.parametrize("last", [5, 4])
def test_curves_of_a_run_that_continues_have_every_step_once(tmp_path: Path, last: int) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = config_of(tmp_path)
    run(config, last=last)
    again = config.replace(resume="auto", metrics_to=f"tensorboard,{MINE}")
    start = find_start(again)
    with RunFolder(config.run_dir, again, start=start, report_seconds=0, metrics_to=again.metrics_to) as folder:
        folder.log(5, {"reward": 50.0})
        folder.log(6, {"reward": 60.0})
    assert start.step == 4 and written[0][4] == 5, "the first of the steps that are taken again"
    curves = accumulator.EventAccumulator(f"{config.run_dir}/tensorboard")
    curves.Reload()
    found = [(point.step, pytest.approx(point.value)) for point in curves.Scalars("reward")]
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 50.0), (6, 60.0)]


@pytest.mark.parametrize("none", [None, "none"])
def test_a_run_may_have_no_writer(none: str | None, tmp_path: Path) -> None:
    SFTConfig(model="m", dataset="d", metrics_to=none)
    with RunFolder(tmp_path, Options(), report_seconds=0, metrics_to=none) as folder:
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
        ("mlflow", "metrics_to='mlflow': mlflow is not installed: pip install mlflow, or give none$"),
        ("nothing", "metrics_to='nothing': cannot be imported .*; give package.module:Class, or one of tensorboard"),
        ("tensorboard,mlflow", "metrics_to='mlflow': mlflow is not installed: pip install mlflow, or leave it out"),
        (".:Writer", "metrics_to='.:Writer': cannot be imported .*'package' argument is required"),
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
    message = r"metrics_to=.*MyWriter': cannot be opened, PermissionError: no key; see to it, or give none$"
    with pytest.raises(ConfigError, match=message):
        RunFolder(tmp_path, Options(), report_seconds=0, metrics_to=MINE)
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "failed"


class Service:
    """What the packages of services are documented to have; runs are known by the names that their writers give them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self._active = threading.local()

    def init(self, *, name: str, **named: Any) -> SimpleNamespace:
        self.calls.append(("init", name, named))
        return SimpleNamespace(
            log=lambda metrics, step=None: self.calls.append(("log", name, (metrics, step))),
            finish=lambda: self.calls.append(("finish", name, None)),
        )

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> SimpleNamespace:
        assert getattr(self._active, "run", None) is None, "the thread has an active run"
        self._active.run = run_id or f"id of {run_name}"
        self.calls.append(("start_run", self._active.run, run_id))
        return SimpleNamespace(info=SimpleNamespace(run_id=self._active.run))

    def log_params(self, params: Mapping[str, str]) -> None:
        self.calls.append(("log_params", self._active.run, params))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None, run_id: str | None = None) -> None:
        self.calls.append(("log", run_id or self._active.run, (metrics, step)))

    def end_run(self) -> None:
        self.calls.append(("finish", self._active.run, None))
        self._active.run = None


@pytest.fixture
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Stands in for the package of the test's parameter, which need not be installed."""
    service = Service()
    monkeypatch.setitem(sys.modules, request.getfixturevalue("name"), service)  # type: ignore[arg-type]
    return service


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_service_is_told_of_steps_as_its_package_wants_it(name: str, service: Service, tmp_path: Path) -> None:
    for resumed in (None, 3):
        writer = WRITERS[name](WriterFacts(tmp_path, {"steps": 3}, "0123456789abcdef", resumed))
        writer.write(2, {"reward": 0.5})
        writer.flush()
        writer.close()
    first, *_, last = service.calls
    called = [method for method, _, _ in service.calls]
    if name == "mlflow":
        assert called == ["start_run", "log_params", "log", "finish", "start_run", "log", "finish"]
        assert [given for method, _, given in service.calls if method == "start_run"] == [None, first[1]]
    else:
        assert called == ["init", "log", "finish"] * 2
        assert first == service.calls[3] and first[2]["resume"] == "allow" and first[2]["config"] == {"steps": 3}
    assert ("log", last[1], ({"reward": 0.5}, 2)) in service.calls and first[1] == last[1]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_users_of_a_process_have_runs_of_their_own_and_none_ends_that_of_another(
    name: str, service: Service, tmp_path: Path
) -> None:
    write_of_two_users(name, tmp_path)
    steps = {user: [given for method, run, given in service.calls if method == "log" and user in run] for user in USERS}
    assert steps == {"ann": [({"ann_1": 1}, 1)], "bob": [({"bob_1": 1}, 1), ({"bob_2": 2}, 2)]}
    assert [run.split("-")[0].split()[-1] for method, run, _ in service.calls if method == "finish"] == ["ann", "bob"]


USERS = ("ann", "bob")


def write_of_two_users(name: str, folder: Path) -> None:
    """Ann's run ends while Bob's goes on, in another thread."""
    both, ann_has_ended = threading.Barrier(2, timeout=60), threading.Event()

    def write(user: str) -> None:
        (folder / user).mkdir()
        both.wait()
        writer = WRITERS[name](WriterFacts(folder / user, {"steps": 3}, user * 4, None))
        both.wait()
        writer.write(1, {f"{user}_1": 1})
        if user == "bob":
            assert ann_has_ended.wait(60)
            writer.write(2, {f"{user}_2": 2})
        writer.close()
        ann_has_ended.set()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, USERS))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_keeps_a_run_on_disk_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with RunFolder(tmp_path / "run", Options(), report_seconds=0, metrics_to="wandb") as folder:
        folder.log(1, {"reward": 0.5})
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_has_a_run_for_each_user_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_of_two_users("wandb", tmp_path)
    files = {user: next((tmp_path / user / "wandb").glob("offline-run-*/*.wandb")) for user in USERS}

    def found() -> dict[str, set[bytes]]:
        return {user: set(re.findall(rb"(?:ann|bob)_[12]", file.read_bytes())) for user, file in files.items()}

    until = time.monotonic() + 30  # the process of wandb's that writes a file does so after its run has finished
    while not all(found().values()) and time.monotonic() < until:
        time.sleep(0.1)
    assert found() == {"ann": {b"ann_1"}, "bob": {b"bob_1", b"bob_2"}}


@pytest.mark.parametrize("name", ["mlflow"])
def test_mlflow_goes_on_with_its_run_where_steps_are_taken_again_and_only_there(
    name: str, service: Service, tmp_path: Path
) -> None:
    def started(drop_from: int | None) -> Any:
        before = len(service.calls)
        writer = WRITERS[name](WriterFacts(tmp_path, {"steps": 3, "lr": None}, "x", drop_from))
        writer.close()
        return service.calls[before]

    assert started(0) == ("start_run", f"id of {tmp_path.name}", None), "there is none to go on with"
    (known,) = (tmp_path / "mlflow_run_id").read_text().splitlines()
    (tmp_path / "mlflow_run_id").write_text("another\n")
    assert started(0) == ("start_run", "another", "another"), "from its first step on"
    assert started(None) == ("start_run", known, None)
    assert (tmp_path / "mlflow_run_id").read_text() == f"{known}\n"
    assert ("log_params", known, {"steps": "3", "lr": "None"}) in service.calls


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_metrics_are_plain_numbers_under_names_that_a_service_takes(name: str, service: Service, tmp_path: Path) -> None:
    writer = WRITERS[name](WriterFacts(tmp_path, {}, "0123456789abcdef", None))
    writer.write(0, {"eval/a/pass@8": np.float32(0.5), "turns": True, "reward": 2})
    ((found, step),) = [given for method, _, given in service.calls if method == "log"]
    passed = "eval/a/pass_at_8" if name == "mlflow" else "eval/a/pass@8"
    assert (found, step) == ({passed: 0.5, "turns": 1.0, "reward": 2.0}, 0)
    assert {type(value) for value in found.values()} == {float}
