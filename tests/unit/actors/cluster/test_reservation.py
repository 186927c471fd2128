"""What is reserved is given back where nobody would hold it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster import placement
from rl_backend.contracts import UnsupportedError


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Placement groups that have been given back."""
    found: list[Any] = []
    monkeypatch.setattr(placement, "remove_placement_group", found.append)
    monkeypatch.setattr(placement.ray, "available_resources", dict)
    monkeypatch.setattr(placement.ray, "cluster_resources", dict)
    monkeypatch.setattr(placement.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(placement, "living_nodes", list)
    return found


def make_groups(monkeypatch: pytest.MonkeyPatch, wait: Any) -> Any:
    group = SimpleNamespace(wait=wait)
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: group)
    return group


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_reservation_that_is_interrupted_or_not_granted_is_given_back(
    monkeypatch: pytest.MonkeyPatch, removed: list[Any]
) -> None:
    group = make_groups(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        placement.reserve_bundles("it", "rank", {"CPU": 1}, 2, "pack", 1.0)
    assert removed == [group]
    group = make_groups(monkeypatch, lambda timeout: False)
    with pytest.raises(UnsupportedError, match="it asks for 2 ranks with"):
        placement.reserve_bundles("it", "rank", {"CPU": 1}, 2, "pack", 1.0)
    assert removed[1:] == [group]
    group = make_groups(monkeypatch, lambda timeout: True)
    assert placement.reserve_bundles("it", "rank", {"CPU": 1}, 2, "pack", 1.0) is group and len(removed) == 2


@pytest.mark.parametrize(
    ("ranks", "cores", "gpus", "bundle"),
    [
        (3, 2, 0, {"CPU": 2}),
        (1, 4, 0.5, {"CPU": 4, "GPU": 0.5}),
        (2, 1, 1, {"CPU": 1, "GPU": 1}),
    ],
)
@pytest.mark.parametrize("strategy", ["pack", "spread"])
@pytest.mark.usefixtures("removed")
def test_each_rank_reserves_the_cores_and_the_share_of_a_gpu_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, gpus: float, bundle: dict[str, float], strategy: Any
) -> None:
    asked: list[Any] = []
    waited: list[float] = []

    def wait(timeout: float) -> bool:
        waited.append(timeout)
        return True

    def make(bundles: list[dict[str, float]], **options: Any) -> Any:
        asked.append((bundles, options))
        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(placement, "placement_group", make)
    nodes = dict(zip(range(ranks), ("b", "a", "b"), strict=False))
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    found = placement.reserve(
        num_ranks=ranks, cores_per_rank=cores, gpus_per_rank=gpus, strategy=strategy, name="x", timeout=7.0
    )
    assert asked == [([bundle] * ranks, {"strategy": strategy.upper(), "name": "x"})] and waited == [7.0]
    slots = [placement.Slot(0, "b", 0), placement.Slot(2, "b", 1), placement.Slot(1, "a", 0)]
    assert list(found.slots) == [slot for slot in slots if slot.bundle < ranks]


def test_a_reservation_is_given_back_where_its_nodes_are_not_learned(
    monkeypatch: pytest.MonkeyPatch, removed: list[Any]
) -> None:
    group = make_groups(monkeypatch, lambda timeout: True)
    monkeypatch.setattr(placement, "placement_group_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        placement.reserve(num_ranks=1, cores_per_rank=1, gpus_per_rank=0, strategy="pack", name="x", timeout=1.0)
    assert removed == [group]


def test_a_rank_s_strategy_is_of_its_own_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def strategy(group: Any, **options: Any) -> Any:
        made.append((group, options))
        return made[-1]

    monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", strategy)
    group: Any = "the group"
    slots = tuple(placement.Slot(bundle, "a", number) for number, bundle in enumerate((2, 0, 1)))
    for rank, bundle in enumerate((2, 0, 1)):
        options = {"placement_group_bundle_index": bundle, "placement_group_capture_child_tasks": True}
        assert placement.Reservation(group, slots).scheduling_strategy(rank) == (group, options)


@pytest.mark.parametrize(("gpus", "bundle"), [(0, {"CPU": 3}), (0.6, {"CPU": 3, "GPU": 0.6})])
def test_room_for_more_ranks_is_asked_for_until_it_is_there_or_given_back(
    gpus: float, bundle: dict[str, float], monkeypatch: pytest.MonkeyPatch, removed: list[Any]
) -> None:
    asked: list[Any] = []
    state, usable = ["PENDING"], [True]

    def make(bundles: Any, **options: Any) -> str:
        asked.append((bundles, options))
        return "a group"

    monkeypatch.setattr(placement, "placement_group", make)
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"state": state[0]})
    monkeypatch.setattr(placement, "ray_is_usable", lambda: usable[0])
    room = placement.AskedRoom(2, cores_per_rank=3, gpus_per_rank=gpus, strategy="spread", name="more")
    assert asked == [([bundle] * 2, {"strategy": "SPREAD", "name": "more"})] and not room.is_there
    for told, is_there in (("CREATED", True), ("REMOVED", False), ("RESCHEDULING", False)):
        state[0] = told
        assert room.is_there is is_there
    usable[0] = False
    room.give_back()
    assert removed == []
    usable[0] = True
    room.give_back()
    assert removed == ["a group"]


@pytest.mark.parametrize(("ranks", "gpus"), [(1, 0.1), (1, 0.5), (1, 1), (2, 0.51), (3, 0.6), (9, 1), (9, 0)])
def test_shares_of_gpus_that_ray_keeps_apart_are_taken(ranks: int, gpus: float) -> None:
    placement.check_asked(ranks, 1, gpus)


def test_ranks_of_one_node_are_numbered_together_from_the_node_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: dict[int, str] = dict(enumerate("cabcaa"))
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    group: Any = None
    slots = [(slot.bundle, slot.node_id, slot.index_on_node) for slot in placement._slots(group, 6)]
    assert slots == [(0, "c", 0), (3, "c", 1), (1, "a", 0), (4, "a", 1), (5, "a", 2), (2, "b", 0)]
