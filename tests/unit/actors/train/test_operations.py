"""Operations of a training group hand on all that they are given."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.train.context import HandleRef
from actors.train.future import GroupFuture, operation
from actors.train.group import TrainGroup
from rl_backend.contracts import LoRAConfig, OptimizerConfig

HANDLE = HandleRef("group", 0, "policy", False, (0,), (0,))
GIVEN: dict[str, Any] = {
    "handle": HANDLE,
    "sequences": ["a sequence"],
    "loss": "a loss",
    "lora": LoRAConfig(rank=3),
    "optimizer": OptimizerConfig(lr=0.5),
    "tensors": {"a": torch.ones(1)},
    "name": "mine",
    "head": "values",
    "device": "cpu",
    "router_replay": "R3",
    "meta": {"temperature": 0.5},
    "extra": {"step": 3},
    "max_tokens_per_micro_batch": 64,
    "path": Path("there"),
    "hf_path": Path("model"),
}
"""Values that are no default; flags are given the opposite of theirs."""


class Recorded(TrainGroup):
    """Keeps what would be sent to the ranks."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, dict[str, Any]]] = []

    def submit(self, name: str, loss: Any = None, /, **arguments: Any) -> GroupFuture[Any]:
        self.sent.append((name, loss, arguments))
        return GroupFuture(name, lambda timeout: None, lambda: True)


OPERATIONS = {
    name: list(inspect.signature(method._method).parameters.values())[1:]
    for name, method in vars(TrainGroup).items()
    if isinstance(method, operation)
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_hands_on_every_argument(name: str) -> None:
    group = Recorded()
    given = {
        parameter.name: (not parameter.default) if isinstance(parameter.default, bool) else GIVEN[parameter.name]
        for parameter in OPERATIONS[name]
    }
    getattr(group, name)(**given)
    ((sent, loss, arguments),) = group.sent
    assert sent == ("forward_backward" if name == "forward" else name)
    assert loss == given.pop("loss", None)
    if name == "forward":
        assert arguments.pop("forward_only") is True
    assert arguments == {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}


def test_what_is_not_given_is_left_to_the_ranks() -> None:
    group = Recorded()
    sequences: Sequence[Any] = ["a sequence"]
    group.forward(HANDLE, sequences)
    group.forward_backward(HANDLE, sequences, None, forward_only=True)
    assert group.sent[0] == group.sent[1]
    ((_, loss, arguments), _) = group.sent
    assert loss is None and arguments == {
        "handle": HANDLE,
        "sequences": sequences,
        "forward_only": True,
        "meta": None,
        "max_tokens_per_micro_batch": None,
        "router_replay": "off",
    }
