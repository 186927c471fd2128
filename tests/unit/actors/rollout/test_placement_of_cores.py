"""The cores of CPU engines are chosen on their node, apart from those of other engines there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from actors.cluster.rendezvous import interface_of
from actors.rollout import placement
from actors.rollout.config import RolloutConfig
from actors.rollout.placement import NodePlace, choose_cores, places_on_nodes
from rl_backend.contracts import ConfigError


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers that no machine has, so that no engine holds them; what is claimed is given back."""
    cores = [100_000, 100_001, 100_002, 100_003]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores))
    monkeypatch.setattr(placement, "_claims", claims := [])
    yield cores
    for claim in claims:
        claim.close()


def config(**settings: Any) -> RolloutConfig:
    return RolloutConfig(model_path="x", num_engines=2, **settings)


def test_engines_of_other_groups_on_a_node_take_other_cores_until_there_are_none_left(four_cores: list[int]) -> None:
    pairs, single = config(cores_per_engine=2), config(cores_per_engine=1)
    assert choose_cores(pairs, 0, NodePlace()) == tuple(four_cores[:2])
    assert choose_cores(pairs, 0, NodePlace()) == tuple(four_cores[2:])
    assert choose_cores(pairs, 0, NodePlace()) == tuple(four_cores[:2])
    placement._claims[2].close()
    assert choose_cores(single, 0, NodePlace()) == (four_cores[2],)


def test_engines_of_one_group_take_cores_by_their_place_on_the_node(four_cores: list[int]) -> None:
    chosen = [choose_cores(config(cores_per_engine=2), engine, NodePlace(engine, 2)) for engine in (1, 0)]
    assert chosen == [tuple(four_cores[2:]), tuple(four_cores[:2])]


def test_engines_that_reserve_nothing_divide_the_cores_of_their_node_evenly(four_cores: list[int]) -> None:
    assert choose_cores(config(), 0, NodePlace(0, 2)) == tuple(four_cores[:2])
    assert choose_cores(config(), 1, NodePlace(1, 2)) == tuple(four_cores[2:])
    assert choose_cores(config(), 0, NodePlace(0, 1)) == tuple(four_cores)
    assert choose_cores(config(), 5, NodePlace(5, 6)) == (four_cores[1],)
    assert choose_cores(config(cores=((4,), (6, 7))), 1, NodePlace(0, 1)) == (6, 7)


def test_more_cores_than_the_node_has_are_refused_with_both_numbers(four_cores: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"cores_per_engine=5: node .* on 4 cores"):
        choose_cores(config(cores_per_engine=5), 0, NodePlace())
    with pytest.raises(ConfigError, match="tensor_parallel=3: needs 6 cores, there are 4"):
        choose_cores(config(tensor_parallel=3), 0, NodePlace(0, 2))


def test_engines_are_counted_on_each_node() -> None:
    assert places_on_nodes({0: "a", 1: "b", 2: "a"}) == {0: NodePlace(0, 2), 2: NodePlace(1, 2), 1: NodePlace(0, 1)}


def test_the_interface_of_an_address_is_found_by_name() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") is None


@pytest.mark.parametrize(
    ("cores", "workers", "place", "expected"),
    [
        (5, 1, NodePlace(0, 2), [0, 1]),
        (5, 1, NodePlace(1, 2), [2, 3]),
        (5, 2, NodePlace(0, 1), [0, 1, 2, 3]),
        (9, 2, NodePlace(1, 2), [4, 5, 6, 7]),
        (4, 2, NodePlace(1, 2), [2, 3]),
        (3, 3, NodePlace(0, 1), [0, 1, 2]),
        (2, 1, NodePlace(3, 5), [1]),
        (1, 1, NodePlace(0, 1), [0]),
    ],
    ids=str,
)
def test_workers_of_an_engine_have_equal_numbers_of_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, place: NodePlace, expected: list[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert choose_cores(config(tensor_parallel=workers), place.index, place) == tuple(expected)


def test_an_engine_shares_those_of_its_own_place_where_too_few_are_left(four_cores: list[int]) -> None:
    assert choose_cores(config(cores_per_engine=3), 0, NodePlace()) == tuple(four_cores[:3])
    assert choose_cores(config(cores_per_engine=3), 1, NodePlace(1, 2)) == (four_cores[0], four_cores[1], four_cores[3])
    assert choose_cores(config(cores_per_engine=4), 0, NodePlace()) == tuple(four_cores)


def test_engines_are_counted_in_their_order_whatever_the_order_of_their_nodes() -> None:
    assert places_on_nodes({2: "a", 0: "a", 1: "a"}) == {0: NodePlace(0, 3), 1: NodePlace(1, 3), 2: NodePlace(2, 3)}
    assert places_on_nodes({}) == {}
