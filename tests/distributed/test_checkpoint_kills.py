"""Ranks killed at an event of the file system in a save: the checkpoint before is there, the partial one is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters import ROOT


@pytest.mark.long
@pytest.mark.shows(
    "resume: two ranks killed in the middle of a save leave the checkpoint before; the partial one is refused"
)
def test_ranks_killed_in_a_save_leave_the_checkpoint_before(tied_model: Path, tmp_path: Path) -> None:
    require_whole_or_refused(tied_model, tmp_path, "--every", "7", "--random", "1")


@pytest.mark.long
@pytest.mark.shows("resume: ranks of both runtimes killed during a background save leave the checkpoint before")
@pytest.mark.parametrize(
    ("way", "every"),
    [(("--asynchronous",), 3), (("--backend", "bridge"), 11), (("--backend", "bridge", "--asynchronous"), 9)],
    ids=["background", "bridge", "bridge in the background"],
)
def test_ranks_of_either_runtime_killed_in_a_save_of_either_kind_leave_the_checkpoint_before(
    tied_model: Path, tmp_path: Path, way: tuple[str, ...], every: int
) -> None:
    # Megatron's saves have several times as many events.
    require_whole_or_refused(tied_model, tmp_path, *way, "--every", str(every), "--random", "3")


def require_whole_or_refused(model: Path, folder: Path, *options: str) -> None:
    """After every trial the checkpoint before loads, the newest too, and what is partial is refused."""
    command = [sys.executable, "-m", "tests.support.kill_trials", str(model), str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    trials = found["failpoints"] + found["random"]
    assert found["failpoints"] >= 3
    assert (found["previous_loaded"], found["newest_loaded"]) == (trials, trials)
    assert 0 < found["refused"] == found["partial"]
