"""What tenants can adapt of a model whose modules lie on several ranks, and who adds gradients up."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rl_backend.lora.modules import AdaptedModule
from rl_backend.runtime.adaptable import Adaptable, RowGroups, SumGroups
from tests.support.rank_threads import run_ranks


def module(name: str, sizes: tuple[int, int] = (6, 4), **changes: Any) -> AdaptedModule:
    given: dict[str, Any] = {"inputs": (0, sizes[0]), "outputs": (0, sizes[1]), **changes}
    return AdaptedModule(name, given.pop("kind", "attention"), *sizes, **given)


class Alone:
    @staticmethod
    def size() -> int:
        return 1


def test_a_model_has_the_modules_of_all_ranks_in_the_order_of_its_weights() -> None:
    weights = ["b.weight", "odd", "b.bias", "a.weight", "c.up.weight", "absent.weight"]
    held = [
        {"a": module("a", inputs=(0, 3))},
        {"c.up": module("c.up", (3, 8), kind="experts"), "b": module("b", (5, 7), kind="feed_forward")},
    ]
    groups: dict[str, Any] = dict.fromkeys(("tensor_group", "data_group", "expert_groups", "whole_group"))

    def of_rank(group: dist.ProcessGroup) -> Adaptable:
        alone: Any = Alone()
        return Adaptable.of_ranks(held[group.rank()], weights, (alone, group), refused_by="x=1: why", **groups)

    for rank, found in enumerate(run_ranks(of_rank)):
        assert list(found.kinds.items()) == [("b", "feed_forward"), ("a", "attention"), ("c.up", "experts")]
        assert list(found.sizes.items()) == [("b", (5, 7)), ("a", (6, 4)), ("c.up", (3, 8))]
        assert found.held == held[rank] and found.refused_by == "x=1: why" and found.value_head is None
    single = Adaptable.of_ranks(held[0], weights, (Alone(), Alone()), **groups)  # type: ignore[arg-type]
    assert list(single.kinds) == ["a"]


class Ranks(NamedTuple):
    number: int

    def rank(self) -> int:
        return self.number


FIRST, SECOND = Ranks(0), Ranks(1)


@pytest.mark.parametrize(
    ("tensor", "data", "summed", "counts"),
    [
        (None, FIRST, True, True),
        (None, SECOND, True, False),
        (FIRST, FIRST, True, True),
        (SECOND, FIRST, True, False),
        (SECOND, FIRST, False, True),
        (SECOND, SECOND, False, False),
        (FIRST, SECOND, True, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("of_experts", [False, True])
def test_one_of_the_ranks_that_have_a_tensor_counts_it(
    tensor: Any, data: Any, summed: bool, counts: bool, of_experts: bool
) -> None:
    mine, other = SumGroups(tensor, data), SumGroups(None, Ranks(1 - data.number))  # type: ignore[arg-type]
    groups = RowGroups(other, mine, 2) if of_experts else RowGroups(mine, other, 2)
    assert groups.summing(of_experts=of_experts) is mine
    assert groups.counts(of_experts=of_experts, summed=summed) is counts


def test_what_cuts_inputs_is_added_up_over_the_ranks_that_have_the_others() -> None:
    def of_rank(group: dist.ProcessGroup) -> list[list[float] | None]:
        groups = RowGroups(SumGroups(group, group), SumGroups(None, group), 1)
        found: list[list[float] | None] = []
        for each in (
            module("cut", inputs=(3, 6)),
            module("whole"),
            module("cut outputs", outputs=(0, 2)),
            module("an expert", inputs=(0, 3), is_expert=True),
        ):
            add_up, x = groups.sum_over_inputs(each), torch.tensor([1.0 + group.rank(), 5.0])
            if add_up is not None:
                add_up(x)
            found.append(None if add_up is None else x.tolist())
        return found

    assert run_ranks(of_rank) == [[[3.0, 10.0], None, None, None]] * 2


def test_experts_have_groups_of_their_own_or_those_of_the_rest() -> None:
    groups: dict[str, Any] = {"tensor_group": "tensor", "data_group": "data", "whole_group": "whole"}
    own: Any = SumGroups("etp", "edp")  # type: ignore[arg-type]
    dense: Any = ("tensor", "data")
    for experts, expected in ((own, own), (None, dense)):
        found = RowGroups.of(Adaptable({}, {}, {}, expert_groups=experts, **groups), 3)
        assert (found.dense, found.experts, found.dp_size) == (dense, expected, 3)


def test_a_head_that_is_the_embedding_comes_last() -> None:
    groups: dict[str, Any] = dict.fromkeys(("tensor_group", "data_group", "expert_groups", "whole_group"))
    held = {"lm_head": module("lm_head", (6, 9), kind="head"), "embed": module("embed", (9, 6), kind="embedding")}
    for weights, order in (
        (["embed.weight"], ["embed", "lm_head"]),
        # One of its own is where its weight is.
        (["lm_head.weight", "embed.weight"], ["lm_head", "embed"]),
    ):
        found = Adaptable.of_ranks(held, weights, (), **groups)
        assert list(found.kinds) == list(found.sizes) == order
        assert found.kinds["lm_head"] == "head" and found.sizes["lm_head"] == (6, 9)
