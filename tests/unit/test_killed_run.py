"""A run that was killed cannot say so; who reads its folder finds out."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.common.run_lock import RunLock
from rl_backend.contracts import ConfigError
from rl_backend.report import write_report
from rl_backend.report.run_data import read_run
from tests.support.clusters import ROOT
from tests.support.page import read_page

RUN = """
import sys, time
from examples.common.run_folder import RunFolder
from rl_backend.contracts import BaseConfig

class Options(BaseConfig):
    steps: int = 3

with RunFolder(sys.argv[1], Options()) as folder:
    folder.log(1, {"reward": 0.5})
    print("logged", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def going(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in ``tmp_path`` that has logged a step and goes on."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "logged\n"
        yield process
        process.kill()


def shown_state(folder: Path) -> str:
    write_report(folder)
    (tile,) = (
        tile for tile in read_page(folder / "report.html").all("div", class_="tile") if tile.one("small").text == "state"
    )
    return tile.one("b").text


@pytest.mark.shows("reading a run: the report of a run that was killed says killed, though run.json still says running")
def test_a_run_that_was_killed_is_said_to_be(going: subprocess.Popen[str], tmp_path: Path) -> None:
    assert shown_state(tmp_path) == "running"
    assert read_run(tmp_path).run["ended"] is None
    going.kill()
    going.wait()
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "running"
    assert shown_state(tmp_path) == "killed"
    run = read_run(tmp_path).run
    assert run["ended"] >= run["started"]


def test_a_run_without_a_lock_is_taken_at_its_word(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"state": "running", "started": "2026-01-01T10:00:00+00:00"}))
    assert read_run(tmp_path).run["state"] == "running"
    assert not (tmp_path / ".lock").exists()


def test_a_run_begins_though_someone_looks_at_its_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        pass
    with (tmp_path / ".lock").open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (reader, fcntl.LOCK_UN)).start()
        with RunLock(tmp_path), pytest.raises(ConfigError, match="is in use by a run that goes on"):
            RunLock(tmp_path)
