"""Progress of a run, as checkpoints have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.folder.checkpoints import Progress, RunCheckpoint, StreamPosition
from actors.rollout.messages import Sample, VersionSpan
from rl_backend.checkpoint.manifest import FileFacts
from rl_backend.contracts import CheckpointError

LOGS = {"metrics.jsonl": {"num_bytes": 7, "xxh3": "0123456789abcdef"}}
RUN = {"example": "Mine", "options": {"lr": 1.0}, "contents": {"dataset": None}, "dtype": "float32"}


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    drawn = [[Sample(0, 0, [5], [7], [-0.5], "stop", (VersionSpan(3, 1),), 0)]]
    saved = Progress.saved(tmp_path, 4, RUN, LOGS, {"log": {"seconds": 2.0}}, StreamPosition(9, drawn))
    state = json.loads(json.dumps(saved.state))
    assert list(state) == ["run", "logs", "log", "batches"]
    found = Progress.of(RunCheckpoint(tmp_path, 4, state, ()))
    assert (found.step, found.part("log"), found.position) == (4, {"seconds": 2.0}, StreamPosition(9, drawn))
    assert found.identity == ("Mine", {"lr": 1.0}, {"dataset": None}, "float32")
    assert found.logs == {"metrics.jsonl": FileFacts(**LOGS["metrics.jsonl"])}


def test_a_run_begins_without_any() -> None:
    begun = Progress.of(None)
    assert (begun.step, begun.state, begun.part("log"), begun.position) == (0, {}, {}, StreamPosition())


@pytest.mark.parametrize(
    ("state", "asked", "message"),
    [
        ({}, "identity", r"is of another program: its state does not say which run it belongs to \(KeyError: 'run'\)"),
        ({"run": {**RUN, "options": 3}}, "identity", "is of another program"),
        ({"run": 3}, "identity", "is of another program"),
        ({"logs": {"metrics.jsonl": {"num_bytes": -1}}}, "logs", "does not say what the logs of its run held"),
        ({"batches": 3}, "position", "has no usable 'batches' in its state"),
        ({"batches": {"taken": 3}}, "position", r"drawn_samples\.pt cannot be read"),
    ],
)
def test_a_state_that_cannot_be_used_is_refused(tmp_path: Path, state: dict[str, Any], asked: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        getattr(Progress(4, state, tmp_path), asked)


def test_a_run_that_samples_nothing_has_no_place_in_its_batches(tmp_path: Path) -> None:
    saved = Progress.saved(tmp_path, 4, RUN, LOGS, {"log": {}}, None)
    assert list(saved.state) == ["run", "logs", "log"] and not list(tmp_path.iterdir())
    assert (saved.step, saved.path) == (4, tmp_path)
    with pytest.raises(CheckpointError, match="has no usable 'batches'"):
        assert saved.taken
    Progress.saved(tmp_path, 4, RUN, LOGS, {}, StreamPosition(2))
    assert Progress(4, {"batches": {"taken": 2}}, tmp_path).position == StreamPosition(2, [])
    assert Progress(4, {"batches": {}}, tmp_path).taken == 0


def test_a_run_of_a_version_that_did_not_say_its_dtype_has_none() -> None:
    old = {name: value for name, value in RUN.items() if name != "dtype"}
    assert Progress(4, {"run": old}, Path()).identity.dtype is None
