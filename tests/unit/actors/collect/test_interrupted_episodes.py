"""Ctrl-C, sent to a process whose episodes hang, closes every environment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.clusters import ROOT

SECONDS = 120.0


@pytest.mark.shows("episodes: Ctrl-C while environments hang closes each of them, in a step and in a held-out set")
@pytest.mark.parametrize("where", ["batch", pytest.param("held_out", marks=pytest.mark.long)])
def test_ctrl_c_closes_every_environment(where: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.interrupted_episodes", where, str(log)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            deadline = time.monotonic() + SECONDS
            while log.read_text().count("stepped") < 16:
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            time.sleep(1.0)
            assert run.poll() is None, "the first one lets the step end"
            run.send_signal(signal.SIGINT)
            _, errors = run.communicate(timeout=SECONDS)
        finally:
            run.kill()
    told = log.read_text().split()
    assert told.count("opened") == told.count("closed") == 16
    assert run.returncode == 130 and "Ctrl-C again ends it at once" in errors
