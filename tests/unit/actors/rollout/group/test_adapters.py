"""Tenants of a group of engines: the versions that it serves, and what it asks before it shares memory with engines."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rollout.config import RolloutConfig
from actors.rollout.group.adapters import GroupAdapters
from actors.rollout.group.engines import EngineSet
from actors.rollout.messages import AdapterVersion, PushedAdapter
from actors.wire.factors import PackedFactors, SharedFactors
from actors.wire.segment import Segment, SharedSegment, host_identity
from rl_backend.contracts import BatchError, RolloutError, WeightVersionError
from tests.support.actors_in_process import Actor, use

CLERK = AdapterVersion("clerk", 7, 2, 4)
FACTORS = PackedFactors.of({"a": (torch.ones(2, 3), 1.0), "b": (torch.ones(3, 2), 2.0)}, "float32")


def version(tenant: str, number: int, of_tenant: int = 1) -> AdapterVersion:
    return AdapterVersion(tenant, of_tenant, number, 2)


CONFIG = RolloutConfig(model_path="x", max_adapters=2)


def tenants(engines: EngineSet | None = None) -> GroupAdapters:
    """Without engines, where none are given."""
    return GroupAdapters(engines or EngineSet(CONFIG))


def test_requests_name_one_tenant_or_one_for_each_prompt() -> None:
    group = tenants()
    poet, clerk = version("poet", 1), version("clerk", 2)
    for adapter in (poet, clerk):
        assert group.switch(PushedAdapter(adapter, FACTORS, "")) is None
    assert group.chosen(None, 2) == [None, None]
    assert group.chosen("poet", 2) == [poet, poet]
    assert group.chosen(["clerk", None], 2) == [clerk, None]
    with pytest.raises(BatchError, match="adapter has 1 names for 2 prompts"):
        group.chosen(["poet"], 2)
    with pytest.raises(RolloutError, match="adapter='nobody' has not been pushed to these engines; there are clerk, poet"):
        group.chosen(["poet", "nobody"], 2)
    for unnamed in ("", ["poet", ""]):
        with pytest.raises(RolloutError, match="adapter='' has not been pushed to these engines"):
            group.chosen(unnamed, 2)


def test_no_tenant_goes_back_to_an_older_version_and_none_is_served_beside_merged_weights() -> None:
    group = tenants()
    group.switch(PushedAdapter(version("poet", 1, of_tenant=5), FACTORS, ""))
    group.require_pushable(version("poet", 2, of_tenant=5))
    with pytest.raises(
        WeightVersionError, match=r"serve 'poet' at version 5 and refuse the older version 4; .*remove_adapter"
    ):
        group.require_pushable(version("poet", 3, of_tenant=4))
    group.base_changed("clerk")
    with pytest.raises(RolloutError, match="the engines serve weights with 'clerk' merged into them"):
        group.chosen("poet", 1)
    with pytest.raises(RolloutError, match="push the base model, after forget_weights"):
        group.require_pushable(version("poet", 4, of_tenant=6))
    group.base_changed("")
    assert group.chosen("poet", 1)[0].version == 5 and group.base_pushes == 2


def test_requests_are_made_while_an_adapter_is_pushed_and_no_other_push_is() -> None:
    group = tenants()
    group.switch(PushedAdapter(version("poet", 1), FACTORS, ""))

    def ask() -> Any:
        with group._engines.lock:  # as `submit` does
            return group.chosen("poet", 1)

    def push() -> None:
        with group._engines.changing:
            order.append("another push")

    def update() -> None:
        with group._engines.updating():
            order.append("an update")

    order: list[str] = []
    with ThreadPoolExecutor(3) as threads:
        with group._engines.changing:
            assert threads.submit(ask).result(10) == [version("poet", 1)]
            others = [threads.submit(push), threads.submit(update)]
            # The push itself makes the version that requests get.
            assert group.switch(PushedAdapter(version("poet", 2, of_tenant=2), FACTORS, "")) is not None
            assert threads.submit(ask).result(10) == [version("poet", 2, of_tenant=2)]
            time.sleep(0.05)
            order.append("the push")
        for each in others:
            each.result(10)
    assert order[0] == "the push" and sorted(order[1:]) == ["an update", "another push"]


class Pusher:
    """Stands for the pushes of a tenant."""

    is_over = False


def test_a_tenant_is_not_pushed_under_the_name_of_another_that_is_in_use() -> None:
    group = tenants()
    first, again, other = Pusher(), Pusher(), Pusher()
    group.require_same_tenant("tenant-0", ("group a", 3), first)
    group.require_same_tenant("tenant-0", ("group a", 3), again)
    group.require_same_tenant("tenant-1", ("group b", 3), other)
    with pytest.raises(RolloutError, match=r"another tenant called 'tenant-0', of another training group .* close\(\)"):
        group.require_same_tenant("tenant-0", ("group b", 3), other)
    group.release_name("tenant-0", first)
    with pytest.raises(RolloutError, match="another tenant called 'tenant-0'"):
        group.require_same_tenant("tenant-0", ("group b", 3), other)
    group.release_name("tenant-0", again)
    group.require_same_tenant("tenant-0", ("group b", 3), other)
    other.is_over = True
    group.require_same_tenant("tenant-0", ("group a", 3), first)
    del first
    group.require_same_tenant("tenant-0", ("group b", 3), Pusher())


class Called(EngineSet):
    """Two engines that answer what they are told to."""

    def __init__(self, outcomes: dict[int, Any]) -> None:
        super().__init__(CONFIG)
        self.outcomes = outcomes
        self.calls: list[tuple[Any, ...]] = []
        self.tenants = tenants(self)

    def start_call(self, method: str, *args: Any, each: Any = None) -> dict[int, Any]:
        self.calls.append((method, *args, dict(self.tenants.served)))
        return {engine: f"call of {engine}" for engine in self.outcomes}

    def gather(self, calls: dict[int, Any], timeout: float = 600.0) -> dict[int, Any]:
        return self.outcomes


@pytest.mark.parametrize("outcomes", [{0: None, 2: None}, {0: None, 2: RolloutError("engine 2 cannot")}])
@pytest.mark.parametrize("shared", [True, False])
def test_a_tenant_that_is_removed_is_refused_before_engines_drop_it_and_leaves_nothing(
    outcomes: dict[int, Any], shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, pusher = Called(outcomes), Pusher()
    group = engines.tenants
    freed: list[tuple[str, list[Any]]] = []
    monkeypatch.setattr(group.memory, "give_back", lambda path, calls: freed.append((path, list(calls))))
    folder = tmp_path / "version"
    folder.mkdir()
    (folder / "adapter.safetensors").write_text("factors")
    poet, clerk = version("poet", 1), version("clerk", 2)
    factors = SharedFactors(Segment("of the poet", 64), FACTORS.layout) if shared else str(folder)
    group.switch(PushedAdapter(poet, factors, ""))
    group.switch(PushedAdapter(clerk, FACTORS, ""))
    group.require_same_tenant("poet", "this one", pusher)
    if outcomes[2] is None:
        group.remove("poet")
    else:
        with pytest.raises(RolloutError, match="engine 2 cannot"):
            group.remove("poet")
    assert engines.calls == [("drop_adapter", poet, {"clerk": clerk})]
    assert freed == ([("of the poet", ["call of 0", "call of 2"])] if shared else []) and folder.exists() == shared
    with pytest.raises(RolloutError, match="adapter='poet' has not been pushed to these engines; there are clerk"):
        group.remove("poet")
    group.require_same_tenant("poet", "another one", Pusher())


def test_factors_in_shared_memory_go_through_ray_to_other_hosts_alone() -> None:
    group, segment = tenants(), SharedSegment(FACTORS.values.nbytes)
    try:
        segment.buffer.copy_(torch.from_numpy(FACTORS.values))
        place = Segment(str(segment.path), segment.nbytes)
        here: Any = SimpleNamespace(host=host_identity())
        there: Any = SimpleNamespace(host="elsewhere")
        pushed = PushedAdapter(version("a", 1), SharedFactors(place, FACTORS.layout), FACTORS.digest)
        assert group.sent_to(pushed, here) is pushed
        sent = group.sent_to(pushed, there)
        assert isinstance(sent.factors, PackedFactors)
        assert (sent.adapter, sent.digest, sent.factors.digest) == (pushed.adapter, FACTORS.digest, FACTORS.digest)
        expected = FACTORS.tensors()
        found = sent.factors.tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        for factors in (FACTORS, "a folder"):
            of_all = pushed._replace(factors=factors)
            assert group.sent_to(of_all, there) is of_all
    finally:
        segment.close()


def placed(*places: tuple[str, str]) -> GroupAdapters:
    """Of engines on these nodes and hosts."""
    engines = EngineSet(CONFIG)
    infos: dict[int, Any] = {engine: SimpleNamespace(node_id=node, host=host) for engine, (node, host) in enumerate(places)}
    engines.add(dict.fromkeys(infos), infos)
    return tenants(engines)


@pytest.mark.parametrize(
    ("driver", "source", "engines", "shared"),
    [
        ("a", ("a", "here"), [("a", "here"), ("a", "here")], True),
        ("b", ("a", "here"), [("a", "here"), ("a", "here")], False),
        ("a", ("a", "elsewhere"), [("a", "elsewhere"), ("a", "elsewhere")], False),
        ("a", ("a", "here"), [("a", "here"), ("b", "here")], False),
        ("a", ("a", "here"), [("a", "elsewhere"), ("a", "here")], False),
    ],
)
def test_memory_is_shared_where_driver_trainer_and_engines_are_on_one_node(
    monkeypatch: pytest.MonkeyPatch, driver: str, source: tuple[str, str], engines: list[tuple[str, str]], shared: bool
) -> None:
    context = SimpleNamespace(get_node_id=lambda: driver)
    monkeypatch.setattr("actors.rollout.group.adapters.ray.get_runtime_context", lambda: context)
    hosts = {"here": host_identity(), "elsewhere": "elsewhere"}
    group = placed(*((node, hosts[host]) for node, host in engines))
    assert group.is_on_node(source[0], hosts[source[1]]) is shared


def test_a_tenant_may_be_pushed_at_its_own_version_or_a_newer_one_whatever_others_have() -> None:
    group = placed()
    group.switch(PushedAdapter(CLERK, None, ""))
    for version in (7, 8):
        group.require_pushable(AdapterVersion("clerk", version, 9, 4))
    group.require_pushable(AdapterVersion("poet", 0, 9, 4))
    with pytest.raises(WeightVersionError) as older:
        group.require_pushable(AdapterVersion("clerk", 6, 9, 4))
    assert older.value.details == {"version": 7, "offered": 6}
    assert group.switch(PushedAdapter(AdapterVersion("clerk", 8, 9, 4), None, "new")) == (CLERK, None, "")
    assert {tenant: each.version for tenant, each in group.served.items()} == {"clerk": 8}


def test_turns_sample_with_the_version_that_is_served() -> None:
    group, poet = tenants(), version("poet", 1)
    assert group.version_of(None) is None
    group.switch(PushedAdapter(poet, None, ""))
    assert group.version_of("poet") is poet
    with pytest.raises(RolloutError, match="adapter='clerk' has not been pushed to these engines; there are poet"):
        group.version_of("clerk")


def test_engines_that_join_get_every_tenant_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "actors.rollout.group.calls")
    group, poet = tenants(), version("poet", 1)
    group.bring({3: (nobody := Actor("3"))}, {})
    assert not nobody.asked
    for adapter in (poet, CLERK, version("poet", 3, of_tenant=2)):
        group.switch(PushedAdapter(adapter, FACTORS, f"digest {adapter.number}"))
    actors = {0: Actor("0"), 4: Actor("4")}
    infos: dict[int, Any] = {engine: SimpleNamespace(host="elsewhere") for engine in actors}
    group.bring(actors, infos)
    for actor in actors.values():
        sent = [(adapter.name, digest) for _, adapter, _, digest in actor.asked]
        assert sent == [("poet@2#3", "digest 3"), ("clerk@7#2", "digest 2")]
    actors[4].answers["push_adapter"] = RolloutError("engine 4 cannot")
    with pytest.raises(RolloutError, match="engine 4 cannot"):
        group.bring(actors, infos)
