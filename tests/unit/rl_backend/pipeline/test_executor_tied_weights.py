"""Parameters of the first stage and their copies in the last have the sum of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.pipeline import executor
from rl_backend.pipeline.executor import add_gradients_of_copies, drop_gradients_of_copies

COPIES = {"head.weight": "embed.weight", "last.scale": "first.scale"}


def parameter(gradient: Sequence[float] | None, *, trained: bool = True) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2), requires_grad=trained)
    made.grad = None if gradient is None else torch.tensor(gradient)
    return made


class Wire:
    """What the ranks of a pipeline give each other, one rank after the other: those of the first are known beforehand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arriving: Sequence[Tensor]) -> None:
        self.arriving = list(arriving)
        self.sent: list[tuple[int, list[float]]] = []
        self.received: list[int] = []
        self.waited = 0
        monkeypatch.setattr(
            executor,
            "dist",
            SimpleNamespace(
                isend="isend", irecv="irecv", P2POp=lambda *args, **options: (args, options), batch_isend_irecv=self.exchange
            ),
        )

    def exchange(self, operations: Sequence[Any]) -> list[Any]:
        for (kind, tensor), options in operations:
            if kind == "isend":
                self.sent.append((options["group_peer"], tensor.tolist()))
            else:
                self.received.append(options["group_peer"])
        work = []
        for (kind, tensor), _ in operations:
            # It arrives when it is waited for.
            value = self.arriving.pop(0) if kind == "irecv" else None
            work.append(SimpleNamespace(wait=lambda tensor=tensor, value=value: self.wait(tensor, value)))
        return work

    def wait(self, tensor: Tensor, value: Tensor | None) -> None:
        self.waited += 1
        if value is not None:
            tensor.copy_(value)


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize(("rank", "names"), [(0, ("embed.weight", "first.scale")), (3, ("head.weight", "last.scale"))])
def test_the_ends_of_a_pipeline_exchange_their_gradients(
    monkeypatch: pytest.MonkeyPatch, rank: int, names: tuple[str, str]
) -> None:
    wire = Wire(monkeypatch, [torch.tensor([10.0, 20.0]), torch.tensor([5.0, 6.0])])
    parameters = {names[0]: parameter([1.0, 2.0]), names[1]: parameter([3.0, 4.0]), "other": parameter([7.0, 8.0])}
    add_gradients_of_copies(parameters, COPIES, group(rank, 4))
    assert gradients(parameters) == {names[0]: [11.0, 22.0], names[1]: [8.0, 10.0], "other": [7.0, 8.0]}
    assert wire.sent == [(3 - rank, [1.0, 2.0]), (3 - rank, [3.0, 4.0])]
    assert wire.received == [3 - rank] * 2 and wire.waited == 4


def test_one_rank_with_both_ends_adds_them_up_without_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, [])
    parameters = {
        "embed.weight": parameter([1.0, 2.0]),
        "head.weight": parameter([10.0, 20.0]),
        "first.scale": parameter([3.0, 4.0]),
        "last.scale": parameter([30.0, 40.0]),
    }
    add_gradients_of_copies(parameters, COPIES, group(0, 2))
    assert gradients(parameters) == {
        "embed.weight": [11.0, 22.0],
        "head.weight": [11.0, 22.0],
        "first.scale": [33.0, 44.0],
        "last.scale": [33.0, 44.0],
    }
    assert wire.sent == []
    # Of a second pass: the copy's of this one alone, the original's of both.
    drop_gradients_of_copies(parameters, COPIES)
    assert parameters["head.weight"].grad is None and parameters["last.scale"].grad is None
    parameters["head.weight"].grad = torch.tensor([0.5, 0.25])
    parameters["last.scale"].grad = torch.tensor([1.0, 1.0])
    add_gradients_of_copies(parameters, COPIES, group(0, 2))
    assert gradients(parameters)["embed.weight"] == gradients(parameters)["head.weight"] == [11.5, 22.25]


def test_a_stage_in_the_middle_and_what_is_frozen_have_no_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, [torch.tensor([5.0, 6.0])])
    middle = {"other": parameter([1.0, 1.0])}
    add_gradients_of_copies(middle, COPIES, group(1, 3))
    drop_gradients_of_copies(middle, COPIES)
    assert gradients(middle) == {"other": [1.0, 1.0]} and wire.sent == []
    # A frozen pair beside a trained one.
    ends = {"embed.weight": parameter(None, trained=False), "first.scale": parameter([1.0, 2.0])}
    add_gradients_of_copies(ends, COPIES, group(0, 3))
    assert gradients(ends) == {"embed.weight": None, "first.scale": [6.0, 8.0]}
    assert wire.sent == [(2, [1.0, 2.0])]


def test_a_copy_that_no_loss_reached_has_a_gradient_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, [torch.tensor([10.0, 20.0])])
    last = {"head.weight": parameter(None), "other": parameter(None)}
    add_gradients_of_copies(last, {"head.weight": "embed.weight"}, group(1, 2))
    assert gradients(last) == {"head.weight": [10.0, 20.0], "other": None}
    assert wire.sent == [(0, [0.0, 0.0])]
    both = {"head.weight": parameter(None), "embed.weight": parameter([1.0, 2.0])}
    add_gradients_of_copies(both, {"head.weight": "embed.weight"}, group(0, 1))
    assert gradients(both) == {"head.weight": [1.0, 2.0], "embed.weight": [1.0, 2.0]}


def test_only_copies_lose_their_gradients() -> None:
    parameters = {name: parameter([1.0, 2.0]) for name in ("embed.weight", "head.weight", "last.scale", "other")}
    drop_gradients_of_copies(parameters, COPIES)
    assert [name for name, each in parameters.items() if each.grad is not None] == ["embed.weight", "other"]


def gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, list[float] | None]:
    return {name: None if each.grad is None else each.grad.tolist() for name, each in parameters.items()}
