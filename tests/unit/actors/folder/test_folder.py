"""A run's folder says how the run went, whatever ended it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from actors.folder import folder as folder_module
from actors.folder.folder import RunFolder
from actors.watch.metrics import Clock
from rl_backend.contracts import BaseConfig, ClusterLostError, ConfigError
from rl_backend.trace.chrome import ChromeTraceWriter
from rl_backend.trace.recorder import recorder
from tests.support.chrome_trace import check_trace
from tests.support.clusters import ROOT
from tests.support.page import read_page


class Options(BaseConfig):
    steps: int = 3


def run(path: Path, error: BaseException | None = None) -> None:
    with RunFolder(path, Options()) as folder:
        folder.log(1, {"reward": 0.5, "seconds/train": 1.0})
        folder.log_samples(1, [{"prompt": "a", "response": "b", "reward": 0.5}])
        if error is not None:
            raise error
        folder.write_summary({"held_out_reward_before": 0.1, "held_out_reward_after": 0.9})


def state(path: Path) -> tuple[str, str | None]:
    facts = json.loads((path / "run.json").read_text())
    return facts["state"], facts["error"]


@pytest.mark.shows("reading a run: the held-out reward before training is the first point of its curve")
def test_what_was_measured_before_training_is_the_first_point_of_a_curve(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Options()) as folder:
        folder.log_start({"held_out_reward": 0.25})
        folder.log(1, {"reward": 0.5})
        folder.log(2, {"reward": 0.5, "held_out_reward": 0.75})
    page = read_page(tmp_path / "report.html")
    curve = page.one("figure", id="chart-held_out_reward").one("svg").attributes["data-hover"]
    assert json.loads(curve)["series"][0]["points"] == [[0, 0, 0.25], [2, 0, 0.75]]
    assert "2 of 3" in [tile.one("b").text for tile in page.all("div", class_="tile")]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ("finished", None)),
        (ConfigError("no <GPU>"), ("failed", "ConfigError: no <GPU>")),
        (KeyboardInterrupt(), ("interrupted", "KeyboardInterrupt")),
    ],
    ids=["finished", "failed", "interrupted"],
)
@pytest.mark.shows("reading a run: report.html is written however the run ended, and says how")
def test_the_report_is_written_however_a_run_ends(
    tmp_path: Path, error: BaseException | None, expected: tuple[str, str | None]
) -> None:
    if error is None:
        run(tmp_path)
    else:
        with pytest.raises(type(error)):
            run(tmp_path, error)
    assert state(tmp_path) == expected
    page = read_page(tmp_path / "report.html")
    tiles = {tile.one("small").text: tile.one("b").text for tile in page.all("div", class_="tile")}
    assert (tiles["state"], tiles["steps"]) == (expected[0], "1 of 3")
    assert [line.text for line in page.all("p", class_="error")] == ([expected[1]] if error else [])
    assert page.one("section", id="samples").all("pre")[1].text == "b"


def test_a_run_that_goes_on_can_be_looked_at(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Options(), report_seconds=1e-9) as folder:
        folder.log(1, {"reward": 0.5})
        page = read_page(tmp_path / "report.html")
        assert page.one("div", class_="running").one("b").text == "running"
        assert "reload for later steps" in page.one("h1").text
    assert [path.name for path in tmp_path.glob(".report*")] == []


def test_without_report_seconds_there_is_one_report_at_the_end(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Options(), report_seconds=0) as folder:
        folder.log(1, {"reward": 0.5})
        assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written_warns_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_report", fail)
    with pytest.warns(UserWarning, match=r"report.html was not written, OSError.*No space left"):
        run(tmp_path)
    assert state(tmp_path) == ("finished", None)


class NoActors:
    """A group whose actors cannot be named once it ``failed``."""

    failed = False

    def trace_actors(self) -> dict[str, Any]:
        if self.failed:
            raise RuntimeError("the group is gone")
        return {}


def test_a_trace_that_fails_is_dropped_with_one_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    group = NoActors()
    with RunFolder(tmp_path, Options(), trace=(group,)) as folder:
        group.failed = True
        with pytest.warns(UserWarning, match=r"trace.json ends here, RuntimeError: the group is gone"):
            folder.log(1, {"reward": 0.5})
        assert not recorder.recording
        with warnings.catch_warnings(action="error"):
            folder.log(2, {"reward": 0.5})
    assert state(tmp_path) == ("finished", None)
    assert [event["name"] for event in check_trace(tmp_path / "trace.json") if event.get("cat") == "step"] == ["step 1"]


def test_a_trace_that_cannot_be_closed_does_not_replace_the_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: ChromeTraceWriter) -> None:
        raise ValueError("no trace")

    monkeypatch.setattr(ChromeTraceWriter, "close", fail)
    with (
        pytest.warns(UserWarning, match=r"trace.json ends here, ValueError: no trace"),
        pytest.raises(KeyError, match="the run's own"),
        RunFolder(tmp_path, Options(), trace=(NoActors(),)),
    ):
        raise KeyError("the run's own")
    assert state(tmp_path)[0] == "failed"
    assert (tmp_path / "report.html").exists()
    assert not recorder.recording


def test_laps_of_a_clock_are_seconds_and_events_of_the_trace() -> None:
    recorder.start()
    try:
        clock = Clock()
        for phase in ("sample", "train", "sample"):
            clock.lap(phase)
        events = recorder.take()
    finally:
        recorder.stop()
    assert [(event.name, event.category) for event in events] == [
        ("sample", "phase"),
        ("train", "phase"),
        ("sample", "phase"),
    ]
    assert clock.seconds["seconds/sample"] == pytest.approx((events[0].duration + events[2].duration) / 1e9)
    assert [event.start for event in events[1:]] == [event.start + event.duration for event in events[:2]]


FORCED_END = """
import signal, sys, time
from actors.cluster import ray_watch
from actors.folder.folder import RunFolder
from rl_backend.contracts import BaseConfig

ray_watch.END_SECONDS = 0.1
watch = ray_watch._Watch.__new__(ray_watch._Watch)
watch._family, watch._ours, watch._reason, watch._told = set(), False, "", False
watch._stopped = ray_watch.threading.Event()
signal.signal(signal.SIGINT, lambda *_: None)  # of a run that does not hear of it
with RunFolder(sys.argv[1], BaseConfig()):
    ray_watch.threading.Thread(target=watch._end, args=("its raylet has ended",)).start()
    time.sleep(300)
"""


def test_a_run_that_hangs_when_ray_is_lost_says_so_before_it_is_ended(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FORCED_END, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    found = state(tmp_path)
    assert found[0] == "failed" and str(found[1]).startswith("ClusterLostError: Ray is lost: its raylet has ended")


def test_the_loss_of_ray_is_not_taken_for_a_trouble_with_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Path:
        raise ClusterLostError("Ray is lost")

    with RunFolder(tmp_path, Options(), report_seconds=1e-9) as folder, monkeypatch.context() as patch:
        patch.setattr(folder_module, "write_report", fail)
        with pytest.raises(ClusterLostError):
            folder.log(1, {"reward": 0.5})
