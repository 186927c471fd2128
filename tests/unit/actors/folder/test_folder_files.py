"""The files of a run's folder: what each says, and when."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster.ray_watch import exit_hooks
from actors.cluster.session import RunStopped
from actors.folder import folder as folder_module
from actors.folder.folder import RunFolder
from actors.folder.lock import RunLock
from actors.folder.resume import RunStart
from actors.watch.metrics import Curves, TrackioWriter, WandbWriter, WriterFacts
from rl_backend.checkpoint.manifest import FileFacts
from rl_backend.contracts import BaseConfig, ConfigError


class Options(BaseConfig):
    steps: int = 3
    name: str = "x"


def read(path: Path, name: str = "run.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / name).read_text())
    return found


def lines(path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Reports that were written, without writing them."""
    written: list[Path] = []
    monkeypatch.setattr(folder_module, "write_report", written.append)
    return written


def opened(path: Path, **options: Any) -> RunFolder:
    return RunFolder(path, Options(), **{"report_seconds": 0, "metrics_to": None, **options})


def test_every_log_has_lines_of_its_own_and_the_facts_of_all_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[Any] = []
    monkeypatch.setattr(folder_module, "export_step", lambda *arguments: exported.append(arguments))
    with opened(tmp_path) as folder:
        folder.log_start({"held_out_reward": 1})
        folder.log(1, {"reward": 2}, ["one", "two"])
        folder.log(2, {"reward": 0.5})
        folder.log_samples(1, iter([{"prompt": "ü"}, {"prompt": "b"}]))
        folder.log_held_out(0, [{"set": "a"}])
        facts = folder.sync_logs()
        folder.write_summary({"best": 1})
        folder.write_summary({"odd": float("inf"), "best": 2})
    assert lines(tmp_path, "metrics.jsonl") == [
        {"step": 0, "held_out_reward": 1},
        {"step": 1, "reward": 2, "warnings": ["one", "two"]},
        {"step": 2, "reward": 0.5},
    ]
    assert lines(tmp_path, "samples.jsonl") == [{"step": 1, "prompt": "ü"}, {"step": 1, "prompt": "b"}]
    assert lines(tmp_path, "held_out.jsonl") == [{"step": 0, "set": "a"}]
    assert "ü" in (tmp_path / "samples.jsonl").read_text(), "as people read it"
    assert {name: each["num_bytes"] for name, each in facts.items()} == {
        name: (tmp_path / name).stat().st_size for name in ("metrics.jsonl", "samples.jsonl", "held_out.jsonl")
    }
    assert exported == [
        (str(tmp_path), 0, {"held_out_reward": 1.0}),
        (str(tmp_path), 1, {"reward": 2.0}),
        (str(tmp_path), 2, {"reward": 0.5}),
    ]
    assert read(tmp_path, "summary.json") == {"odd": "Infinity", "best": 2}
    assert read(tmp_path, "config.json") == {"steps": 3, "name": "x"}


def test_files_of_a_user_that_a_run_has_too_are_renamed(tmp_path: Path) -> None:
    for name in ("config.json", "report.html"):
        (tmp_path / name).write_text("mine")
    for _ in range(2):  # those of a run before are replaced
        with opened(tmp_path):
            pass
    assert [(tmp_path / name).read_text() for name in ("config.1.json", "report.1.html")] == ["mine", "mine"]
    assert not list(tmp_path.glob("*.2.*"))
    assert read(tmp_path, "config.json")["steps"] == 3


def test_what_a_run_was_called_with_and_when_it_ended_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "/x/mine.py", "--lr", "1"])
    folder = opened(tmp_path)
    running = read(tmp_path)
    assert (running["state"], running["error"], running["ended"], running["resumed"]) == ("running", None, None, [])
    assert running["command"] == ["python3", "/x/mine.py", "--lr", "1"]
    assert folder._write_end in exit_hooks
    with folder:
        pass
    assert folder._write_end not in exit_hooks
    finished = read(tmp_path)
    assert {**running, "state": "finished", "ended": finished["ended"]} == finished
    assert finished["ended"] >= finished["started"] and finished["started"].endswith("+00:00")


@pytest.mark.parametrize(
    ("error", "state", "text"),
    [
        (ValueError("no"), "failed", "ValueError: no"),
        (ValueError(), "failed", "ValueError"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (RunStopped("Ctrl-C after step 3"), "interrupted", "Ctrl-C after step 3"),
    ],
)
def test_how_a_run_ended_is_said_in_words(
    tmp_path: Path, quick: list[Path], error: BaseException, state: str, text: str
) -> None:
    with pytest.raises(type(error)), opened(tmp_path):
        raise error
    assert (read(tmp_path)["state"], read(tmp_path)["error"]) == (state, text)
    assert quick == [tmp_path]
    RunLock(tmp_path).release()


@pytest.mark.parametrize("cause", ["termination", "cluster_loss"])
def test_what_made_a_call_fail_is_told_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    monkeypatch.setattr(folder_module, cause, lambda: ConfigError("what came first"))
    with opened(tmp_path / "well"):
        pass
    assert read(tmp_path / "well")["state"] == "finished", "an error alone has a cause"
    with pytest.raises(ValueError, match="comes of it"), opened(tmp_path / "ill"):
        raise ValueError("comes of it")
    assert read(tmp_path / "ill")["error"] == "ConfigError: what came first"


def test_reports_take_a_small_part_of_the_time_and_come_at_the_end(
    tmp_path: Path, quick: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(folder_module, "time", SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=time.monotonic_ns))

    def slow(path: Path) -> None:
        quick.append(path)
        now[0] += 2.0

    monkeypatch.setattr(folder_module, "write_report", slow)
    counts: list[int] = []
    with opened(tmp_path, report_seconds=60.0) as folder:
        for step, seconds in enumerate((59.9, 0.2, 59.0, 40.0, 1.5), 1):
            now[0] += seconds
            folder.log(step, {})
            counts.append(len(quick))
    assert counts == [0, 1, 1, 1, 2], "after a report of 2 seconds the next is 100 seconds away"
    assert len(quick) == 3


def test_results_of_a_run_before_are_set_aside_and_its_place_in_the_steps_known(tmp_path: Path) -> None:
    made: list[WriterFacts] = []
    kept: dict[str, Any] = {}
    for number, start in enumerate((RunStart(), RunStart(replaces=True))):
        with opened(tmp_path, start=start, metrics_to=f"{__name__}:Noted") as folder:
            folder.log(1, {"reward": number})
            folder.write_summary({"number": number})
            folder.place("model").mkdir()
            kept = {name: FileFacts(**each) for name, each in folder.sync_logs().items()}
        made += NOTED
        NOTED.clear()
    checkpoint: Any = SimpleNamespace(step=1, path=tmp_path)
    with opened(tmp_path, start=RunStart(checkpoint, kept), metrics_to=f"{__name__}:Noted"):
        made += NOTED
    assert [each.drop_from for each in made] == [None, 0, 2]
    assert made[0].identity == made[1].identity or made[1].identity == made[2].identity
    assert made[2].options == {"steps": 3, "name": "x"} and made[2].folder == tmp_path
    assert (read(tmp_path, "summary.1.json"), read(tmp_path, "summary.2.json")) == ({"number": 0}, {"number": 1})
    assert not (tmp_path / "summary.json").exists() and (tmp_path / "model.1").is_dir()
    assert lines(tmp_path, "metrics.jsonl") == [{"step": 1, "reward": 1}]
    assert [each["after_step"] for each in read(tmp_path)["resumed"]] == [1]


NOTED: list[WriterFacts] = []


class Noted:
    def __init__(self, facts: WriterFacts) -> None:
        NOTED.append(facts)

    def write(self, step: int, metrics: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_a_writer_that_cannot_be_opened_closes_those_that_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(Noted, "close", lambda self: closed.append("first"))
    facts = WriterFacts(tmp_path, {}, "id", None)
    with pytest.raises(ConfigError, match=r"^metrics_to='\S+:read': cannot be opened, .*; see to it, or leave it out$"):
        Curves(f"{__name__}:Noted,{__name__}:read", facts)
    assert closed == ["first"]


@pytest.mark.parametrize("project", [None, "mine"])
def test_services_get_a_project_a_name_and_an_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: str | None
) -> None:
    asked: list[dict[str, Any]] = []
    service = SimpleNamespace(init=lambda **options: asked.append(options))
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, service)
        monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
        if project:
            monkeypatch.setenv(f"{name.upper()}_PROJECT", project)
    facts = WriterFacts(tmp_path / "grpo", {"steps": 3}, "0123456789", 4)
    WandbWriter(facts)
    TrackioWriter(facts)
    common = {"project": project or "rl-backend", "config": {"steps": 3}, "resume": "allow"}
    assert asked == [
        {**common, "name": "grpo", "id": "0123456789", "dir": f"{tmp_path}/grpo", "reinit": "create_new"},
        {**common, "name": "grpo-012345"},
    ]
