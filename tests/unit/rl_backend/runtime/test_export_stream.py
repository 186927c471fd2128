"""Buckets of an export, and the stream over them on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.parallel.groups import ParallelGroups, close_groups, open_groups
from rl_backend.runtime.export_stream import plan_buckets, require_known_names, start_stream


class Item(NamedTuple):
    name: str
    nbytes: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.name


ITEMS = [Item("a", 4), Item("b", 4), Item("c", 8), Item("d", 2, torch.float16), Item("e", 2, torch.float16), Item("f", 2)]


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    opened = open_groups(ParallelConfig(), torch.device("cpu"))
    yield opened
    close_groups(opened)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(None, ["a", "b", "c", "d", "e", "f"]), (8, ["ab", "c", "de", "f"]), (100, ["abc", "de", "f"])],
)
def test_buckets_keep_the_order_the_budget_and_one_dtype(budget: int | None, expected: list[str]) -> None:
    assert ["".join(item.name for item in bucket) for bucket in plan_buckets(ITEMS, budget)] == expected


def test_a_budget_below_the_largest_item_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="byte_budget=7 cannot hold c with 8 bytes; raise the budget"):
        plan_buckets(ITEMS, 7)


def test_nothing_to_export_fills_no_bucket() -> None:
    assert plan_buckets([], 1) == []
    assert plan_buckets([], None) == []


def test_unknown_names_are_listed() -> None:
    require_known_names("export_weights", None, ["a"])
    with pytest.raises(ConfigError, match="export_gradients: the model has no weights called x, y; weight_infos lists"):
        require_known_names("export_gradients", ["y", "a", "x"], ["a"])


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_closed_early_finishes_the_bucket_it_is_in_and_starts_no_other(groups: ParallelGroups, taken: int) -> None:
    gathered: list[str] = []

    def gather(bucket: Sequence[Item]) -> Iterator[tuple[str, Tensor]]:
        for item in bucket:
            gathered.append(item.name)
            yield item.name, torch.empty(0)

    stream = start_stream(plan_buckets(ITEMS, 8), gather, groups.world_group, groups.device)
    for _ in range(taken):
        next(stream)
    stream.close()
    assert "".join(gathered) == {0: "", 1: "ab", 3: "abc"}[taken]
