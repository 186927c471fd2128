"""Operations of a training group hand on all that they are given."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.train.context import HandleRef
from actors.train.group import GroupFuture, TrainGroup, operation
from rl_backend.contracts import AdamParams, LoRAConfig, OptimizerConfig
from rl_backend.contracts.atoms import Operation
from rl_backend.runtime import Runtime

HANDLE = HandleRef("group", 0, "policy", False, (0,), (0,))
GIVEN: dict[str, Any] = {
    "handle": HANDLE,
    "lora": LoRAConfig(rank=3),
    "optimizer": OptimizerConfig(lr=0.5),
    "adam": AdamParams(lr=0.5),
    "tensors": {"a": torch.ones(1)},
    "name": "mine",
    "head": "values",
    "device": "cpu",
    "extra": {"step": 3},
    "path": Path("there"),
    "hf_path": Path("model"),
}
"""Values that are no default; flags are given the opposite of theirs."""


class Recorded(TrainGroup):
    """Keeps what would be sent to the ranks."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def _submit(self, operation: Operation) -> GroupFuture[Any]:
        self.sent.append((operation.name, dict(operation.arguments)))
        return GroupFuture(operation.name, lambda timeout: None, lambda: True)


ATOMS_OF_A_GROUP = [
    name
    for name, method in vars(TrainGroup).items()
    if isinstance(method, operation) and name not in ("forward_backward", "forward", "weight_version", "export_lora_adapter")
]


def parameters(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(getattr(Runtime, name)).parameters.values())[1:]


@pytest.mark.parametrize("name", ATOMS_OF_A_GROUP)
def test_an_operation_hands_on_every_argument(name: str) -> None:
    group = Recorded()
    given = {
        parameter.name: (not parameter.default) if isinstance(parameter.default, bool) else GIVEN[parameter.name]
        for parameter in parameters(name)
    }
    getattr(group, name)(**given)
    assert group.sent == [(name, given)]


@pytest.mark.parametrize("name", ATOMS_OF_A_GROUP)
def test_what_is_not_given_or_has_its_default_is_left_to_the_ranks(name: str) -> None:
    group = Recorded()
    needed = {each.name: GIVEN[each.name] for each in parameters(name) if each.default is each.empty}
    getattr(group, name)(**needed)
    getattr(group, name)(
        **{each.name: GIVEN[each.name] if each.default is each.empty else each.default for each in parameters(name)}
    )
    assert group.sent == [(name, needed)] * 2


def test_an_argument_that_no_atom_takes_is_refused_before_anything_is_sent() -> None:
    group: Any = Recorded()
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        group.zero_grad(HANDLE, rate=3)
    with pytest.raises(TypeError, match="missing a required argument: 'handle'"):
        group.zero_grad()
    assert not group.sent
