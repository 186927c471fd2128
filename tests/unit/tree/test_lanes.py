"""The lanes of the suite end what their tests have started, however they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests import lanes
from tests.support.claims import ROOT

TEST = """
import os, time
from pathlib import Path
import pytest

@pytest.fixture
def started():
    folder = Path(__file__).parent
    yield folder
    time.sleep(1.0)
    (folder / "ended").touch()

def test_goes_on(started):
    (started / "pid").write_text(str(os.getpid()))
    time.sleep(300)
"""
RUN = """
import sys
from pathlib import Path
from tests import lanes

lanes.ROOT, lanes.LANES, lanes.NICENESS = Path(sys.argv[1]), (("one",), ("two",)), (0, 5)
sys.exit(lanes.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("number", "files"),
    [
        pytest.param(signal.SIGINT, False, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, False, id="SIGTERM", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, True, id="Ctrl-C for files", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_suite_runs_the_ends_of_its_fixtures(tmp_path: Path, number: int, files: bool) -> None:
    folders = ("one",) if files else ("one", "two")
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_of_lane.py").write_text(TEST)
    arguments = ["-p", "no:cacheprovider", *([str(tmp_path / "one")] if files else [])]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            for name in folders:
                wait_for(tmp_path / name / "pid")
            time.sleep(0.2)
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does
            else:
                process.send_signal(number)
            process.wait(60)
            for name in folders:
                assert (tmp_path / name / "ended").exists()
                with pytest.raises(ProcessLookupError):
                    os.kill(int((tmp_path / name / "pid").read_text()), 0)
            assert process.returncode == 143 or number == signal.SIGINT
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_the_lanes_hold_every_folder_of_tests() -> None:
    folders = {f"tests/{path.relative_to(ROOT).parts[1]}" for path in (ROOT / "tests").rglob("test_*.py")}
    elsewhere = (*lanes.BESIDE, *lanes.VERL, *lanes.RANKS)
    held = [each for lane in lanes.LANES for each in lane if not each.startswith("--")]
    assert sorted(held) == sorted([*folders, *elsewhere])
    for each in elsewhere:
        assert (ROOT / each).exists() and f"--ignore={each}" in lanes.LANES[0] and each not in lanes.LANES[0]
    assert all("--suite" in lane for lane in lanes.LANES if any(each.endswith(".py") for each in lane if each[0] != "-"))


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
