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
