"""What a load takes from a checkpoint: weights, a version, and random state where there is any of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.checkpoint.training_state import TensorPieces
from rl_backend.contracts import CheckpointError, NativeConfig, ParallelConfig, RuntimeConfig
from rl_backend.parallel.groups import ParallelGroups, close_groups, open_groups
from rl_backend.runtime.checkpoints import CheckpointWriter, load_state, training_manifest

NEW, OLD = "random.streams.cpu.one.0", "random.streams.one.0"


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    opened = open_groups(ParallelConfig(), torch.device("cpu"))
    yield opened
    close_groups(opened)


def handle_of(groups: ParallelGroups, **facts: Any) -> Any:
    given = {
        "groups": groups,
        "hf_config": {"model_type": "m"},
        "saved_shapes": {"w": (4,)},
        "head": "log_probs",
        "kept": {},
        "in_float32": frozenset(),
        "weight_version": 5,
        "config": RuntimeConfig(hf_path="there", backend_cfg=NativeConfig(device="cpu")),
        "broken": "a pass failed",
        "damaged": "a load failed",
    }
    return SimpleNamespace(**{**given, **facts})


def save(groups: ParallelGroups, path: Path, **random: Tensor) -> Path:
    handle = handle_of(groups)
    tensors: dict[str, Any] = {"model.w": TensorPieces((4,), {(0,): torch.arange(4.0)})}
    tensors |= {{"new": NEW, "old": OLD}[name]: state for name, state in random.items()}
    manifest = training_manifest(handle, schedule_steps=3, optimizer_steps=2)
    CheckpointWriter(groups.host_group).save_training_state(handle, path, lambda: (tensors, manifest), asynchronous=False)
    return path


def state_of(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"new": state_of(1, 2, 3)}, [1, 2, 3]),
        # Older checkpoints have it by another name, whatever the device.
        ({"old": state_of(4, 5, 6)}, [4, 5, 6]),
        ({"new": state_of(1, 2, 3), "old": state_of(4, 5, 6)}, [1, 2, 3]),
        ({"old": state_of(4, 5, 6, 7)}, None),
        ({}, None),
    ],
    ids=["its own", "earlier", "both", "another device's", "none"],
)
def test_random_state_is_taken_where_there_is_any_and_stays_where_there_is_none(
    groups: ParallelGroups, tmp_path: Path, saved: dict[str, Tensor], expected: list[int] | None
) -> None:
    path = save(groups, tmp_path / "saved", **saved)
    handle, weight, random = handle_of(groups, weight_version=0), torch.zeros(4), state_of(7, 8, 9)
    filled: dict[str, Any] = {"model.w": TensorPieces((4,), {(0,): weight}), NEW: random}
    manifest, loaded = load_state(
        handle, path, lambda _: filled, earlier=lambda name: name.replace("streams.cpu.", "streams.", 1)
    )
    assert weight.tolist() == [0, 1, 2, 3] and manifest.schedule_steps == 3
    assert random.tolist() == (expected or [7, 8, 9])
    assert loaded.keys() == {"model.w", *([NEW] if expected else [])}
    assert (handle.weight_version, handle.broken, handle.damaged) == (5, "", "")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"hf_config": {"model_type": "n"}}, "'m'"),
        ({"saved_shapes": {"w": (5,)}}, r"w has shape \(4,\) there and \(5,\) here"),
        ({"saved_shapes": {"w": (4,), "x": (1,)}}, "x has shape none there"),
        ({"head": "values"}, "head=.log_probs., this one has head=.values."),
    ],
    ids=str,
)
def test_a_model_that_is_another_is_left_as_it_is(
    groups: ParallelGroups, tmp_path: Path, facts: dict[str, Any], message: str
) -> None:
    path = save(groups, tmp_path / "saved")
    handle, asked = handle_of(groups, weight_version=9, **facts), list[Any]()
    with pytest.raises(CheckpointError, match=message):
        load_state(handle, path, lambda each: asked.append(each) or {})  # type: ignore[func-returns-value]
    assert (handle.weight_version, handle.broken, handle.damaged, asked) == (9, "a pass failed", "a load failed", [])


def test_a_reason_of_the_caller_comes_before_anything_is_filled(groups: ParallelGroups, tmp_path: Path) -> None:
    path, weight, seen = save(groups, tmp_path / "saved"), torch.full((4,), 7.0), list[int]()
    handle = handle_of(groups)

    def check(manifest: Any) -> None:
        seen.append(manifest.optimizer_steps)
        raise CheckpointError("uneven steps")

    filled: dict[str, Any] = {"model.w": TensorPieces((4,), {(0,): weight})}
    with pytest.raises(CheckpointError, match="uneven steps"):
        load_state(handle, path, lambda _: filled, check=check)
    assert seen == [2] and weight.tolist() == [7.0] * 4 and handle.damaged == "a load failed"
    other: dict[str, Any] = {"model.w": TensorPieces((4,), {(0,): weight.to(torch.int64)})}
    with pytest.raises(CheckpointError, match=r"model\.w"):
        load_state(handle, path, lambda _: other)
    assert handle.damaged == "a load failed", "not begun"
