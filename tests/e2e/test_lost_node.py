"""A run over two Ray nodes of this machine loses one of them, goes on with fewer ranks, and gets it back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import TwoNodes
from tests.support.lost_node_run import RETURNED, STEPS
from tests.support.runs import steps_of

_SECONDS = 120.0


def options(task: Path, folder: Path, **changes: Any) -> list[str]:
    values = {
        "model": task / "model",
        "dataset": task / "train.jsonl",
        "run-dir": folder,
        "steps": STEPS,
        "batch-size": 8,
        "dtype": "float32",
        "metrics-to": "none",
        **changes,
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


@pytest.mark.long
@pytest.mark.shows(
    "recovery: a run whose node is lost goes on with one rank in place of two, grows again when a node returns, and has the "
    "losses of a run on one rank within 1e-5"
)
@pytest.mark.parametrize("recover", ["memory", "checkpoint"])
def test_a_run_that_loses_a_node_goes_on_with_fewer_ranks_and_grows_again(task: Path, tmp_path: Path, recover: str) -> None:
    spread = {"ranks": 2, "placement": "spread", "min-ranks": 1, "recover": recover}
    saves = {"save-every": 3} if recover == "checkpoint" else {}
    with TwoNodes() as cluster:
        process = cluster.python("-m", "tests.support.lost_node_run", *options(task, tmp_path / "run", **spread, **saves))
        try:
            until(lambda: len(steps_of(tmp_path / "run")) >= 5, process)
            cluster.remove_last_node()
            until(lambda: len(steps_of(tmp_path / "run")) >= RETURNED, process)
            cluster.add_another_node()
            output, _ = process.communicate(timeout=_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0, output
        alone = cluster.run("-m", "examples.sft", *options(task, tmp_path / "alone"))
        assert alone.returncode == 0, alone.stdout
    found, expected = steps_of(tmp_path / "run"), steps_of(tmp_path / "alone")
    assert [line["nll"] for line in found] == pytest.approx([line["nll"] for line in expected], rel=1e-5)
    assert [line["reshape/ranks"] for line in found if "reshape/count" in line] == [1, 2], output
    (lost,) = [line for line in output.splitlines() if "were replaced" in line]
    assert "by 1 rank in place of 2 ranks (dp=2), for which the cluster has no room, in" in lost
    assert "the run goes on" in lost
    (back,) = [line for line in output.splitlines() if " went from " in line]
    assert "went from 1 rank to 2 ranks (dp=2) in" in back and back.endswith("(the cluster has room again)")


def until(condition: Any, process: Any) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
