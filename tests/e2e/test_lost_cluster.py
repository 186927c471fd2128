"""Runs that lose Ray itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.clusters import ROOT

SERVERS = ("gcs_server", "raylet")
SECONDS = 150.0


@pytest.mark.long
@pytest.mark.shows("failures: a run that loses Ray's gcs or raylet ends with status 2, names it and leaves no process")
def test_a_run_that_loses_a_server_of_ray_ends_and_names_it(tied_model: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    runs = {
        server: subprocess.Popen(
            [sys.executable, "-m", "tests.support.lost_cluster", server, str(tied_model), str(tmp_path / server)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for server in SERVERS
    }
    try:
        for server, run in runs.items():
            output, _ = run.communicate(timeout=SECONDS)
            assert run.returncode == 2, output
            last = output.rstrip().splitlines()[-1]
            assert last.startswith(f"error: Ray is lost: its {server} on this machine ended with status -9"), output
            facts = json.loads((tmp_path / server / "run.json").read_text())
            assert facts["state"] == "failed"
            assert facts["error"].startswith(f"ClusterLostError: Ray is lost: its {server}")
            pids = map(int, (tmp_path / server / "pids").read_text().split())
            assert [pid for pid in pids if lives(pid)] == []
    finally:
        for run in runs.values():
            run.kill()
            run.wait()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
