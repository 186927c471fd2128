"""SIGTERM ends a run as Ctrl-C does, wherever it is, and the run says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters import ROOT

SECONDS = 120.0


@pytest.mark.parametrize(
    "where",
    [
        "driver",
        *(
            pytest.param(where, marks=pytest.mark.long)
            for where in ("ray", "reward", "twice", "reward_that_catches_all", "reward_that_exits")
        ),
    ],
)
@pytest.mark.shows("failures: SIGTERM (a scheduler, ray job stop) ends a run with status 143, and run.json says interrupted")
def test_sigterm_interrupts_a_run(where: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.terminated_run", where, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "works\n"
            run.terminate()
            _, errors = run.communicate(timeout=SECONDS)
        finally:
            run.kill()
    assert errors.rstrip().splitlines()[-1] == "stopped by SIGTERM"
    assert run.returncode == 143
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["state"], facts["error"]) == ("interrupted", "SIGTERM")
    assert (tmp_path / "report.html").exists()
