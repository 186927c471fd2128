"""Adapters that give way to others in an engine, and the versions that a group serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rollout.adapter_group import AdapterGroup
from actors.rollout.adapters import AdapterReceiver
from actors.rollout.config import RolloutConfig
from actors.rollout.messages import AdapterVersion, EngineInfo, PushedAdapter
from actors.wire.factors import PackedFactors, SharedFactors
from actors.wire.segment import Segment, SharedSegment, host_identity
from rl_backend.contracts import BatchError, RLBackendError, RolloutError, WeightCheckError, WeightVersionError

FACTORS = PackedFactors.of({"a": (torch.ones(2, 3), 1.0), "b": (torch.ones(3, 2), 2.0)}, "float32")


def version(tenant: str, number: int, of_tenant: int = 1) -> AdapterVersion:
    return AdapterVersion(tenant, of_tenant, number, 2)


class Slots:
    """vLLM as far as adapters go: numbers in slots, of which there are ``most``."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: set[int] = set()
        self.kept: set[str] = set()
        self.owned: set[str] = set()
        self.problem = self.digest = ""
        self.llm_engine = self

    def add_lora(self, request: Any) -> None:
        assert request.lora_path in self.kept and len(self.held) < self.most
        self.held.add(request.lora_int_id)

    def remove_lora(self, number: int) -> None:
        self.held.discard(number)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[str]:
        if method == "keep_adapter":
            self.kept.add(args[0])
            self.digest = args[3]
        elif method == "own_adapter":
            assert args[0] in self.kept
            self.owned.add(args[0])
        elif method == "forget_adapter":
            self.kept.remove(args[0])
        return [self.problem if method == "adapter_problem" else ""]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> AdapterReceiver:
    """With room for two adapters and the one that is loaded."""

    def request(adapter: AdapterVersion) -> Any:
        return SimpleNamespace(lora_int_id=adapter.number, lora_path=adapter.path)

    monkeypatch.setattr("actors.rollout.adapters.lora_request", request)
    receiver = AdapterReceiver(RolloutConfig(model_path="x", max_adapters=2), 0, "cpu")
    receiver._vllm_call = lambda call, *args, **kwargs: call(*args, **kwargs)  # type: ignore[method-assign]
    receiver._llm = Slots(3)
    return receiver


def keep(engine: AdapterReceiver, *adapters: AdapterVersion) -> None:
    for adapter in adapters:
        engine.keep_adapter(adapter, FACTORS.tensors(), FACTORS.digest)


def test_the_adapter_not_used_for_longest_gives_way_and_comes_back(engine: AdapterReceiver) -> None:
    adapters = [version(name, number) for number, name in enumerate("abcde", 1)]
    keep(engine, *adapters)
    for adapter in adapters[:3]:
        engine.load_adapter(adapter)
    engine.load_adapter(adapters[0])
    engine.load_adapter(adapters[3])
    assert engine._llm.held == {1, 3, 4}
    engine.load_adapter(adapters[1])
    assert engine._llm.held == {1, 2, 4}
    engine.drop_adapter(adapters[1])
    assert engine._llm.held == {1, 4} and adapters[1].path not in engine._llm.kept
    with pytest.raises(RolloutError, match="engine 0 does not have b@1#2: push it"):
        engine.load_adapter(adapters[1])


@pytest.fixture
def in_use(engine: AdapterReceiver, monkeypatch: pytest.MonkeyPatch) -> dict[bool, set[AdapterVersion]]:
    """Adapters of the requests that run (True), and of all (False)."""
    adapters: dict[bool, set[AdapterVersion]] = {True: set(), False: set()}
    monkeypatch.setattr(engine._loop, "adapters", lambda *, running: adapters[running])
    return adapters


def test_requests_wait_for_a_slot_that_no_running_one_needs(
    engine: AdapterReceiver, in_use: dict[bool, set[AdapterVersion]]
) -> None:
    a, b, c, d = (version(name, number) for number, name in enumerate("abcd", 1))
    keep(engine, a, b, c, d)
    for adapter in (a, b):
        assert engine._take_slot(adapter)
        in_use[True].add(adapter)
    assert engine._take_slot(a)
    assert not engine._take_slot(c) and engine._llm.held == {1, 2}
    for pushed in (c, d):  # a push has a slot of its own, in which versions give way to each other
        engine.load_adapter(pushed)
        assert engine._llm.held == {1, 2, pushed.number}
    in_use[True].remove(a)
    assert engine._take_slot(c) and engine._llm.held == {2, 3, 4}


def test_an_adapter_is_dropped_when_the_last_request_that_samples_with_it_has_left(
    engine: AdapterReceiver, in_use: dict[bool, set[AdapterVersion]]
) -> None:
    old, new = version("a", 1), version("a", 2, of_tenant=2)
    keep(engine, old, new)
    in_use[False].add(old)
    for adapter in (old, new):
        assert engine._take_slot(adapter)
    engine.drop_adapter(old)
    engine._leave_slot(old)
    assert engine._llm.held == {1, 2}
    in_use[False].clear()
    engine._leave_slot(new)
    assert engine._llm.held == {1, 2}
    engine._leave_slot(old)
    assert engine._llm.held == {2} and engine._llm.kept == {new.path}
    with pytest.raises(RolloutError, match="engine 0 does not have a@1#1: push it"):
        engine._take_slot(old)


def test_of_what_is_dropped_and_in_use_an_engine_has_its_own_copy_of_shared_factors(
    engine: AdapterReceiver, in_use: dict[bool, set[AdapterVersion]]
) -> None:
    segment = SharedSegment(FACTORS.values.nbytes)
    try:
        shared = SharedFactors(Segment(str(segment.path), segment.nbytes), FACTORS.layout)
        of_ray, idle, busy = version("a", 1), version("b", 2), version("c", 3)
        for adapter, factors in ((of_ray, FACTORS), (idle, shared), (busy, shared)):
            engine.push_adapter(adapter, factors, FACTORS.digest)
        in_use[False] |= {of_ray, busy}
        for adapter in (of_ray, idle, busy, busy):
            engine.drop_adapter(adapter)
        assert engine._llm.owned == {busy.path} and engine._llm.kept == {of_ray.path, busy.path}
    finally:
        segment.close()


def test_what_the_kernels_do_not_hold_is_not_served(engine: AdapterReceiver) -> None:
    adapter = version("a", 1)
    engine.push_adapter(version("b", 1), FACTORS, "of the sender")
    assert engine._llm.digest == "of the sender", "and not the one that came with the factors"
    engine.drop_adapter(version("b", 1))
    engine._llm.problem = "it was damaged on its way"
    with pytest.raises(WeightCheckError, match="engine 0: a@1#1: it was damaged on its way"):
        engine.push_adapter(adapter, FACTORS, FACTORS.digest)
    assert not engine._llm.held and not engine._loaded


class Group(AdapterGroup):
    """Tenants without engines."""

    def __init__(self) -> None:
        super().__init__()
        self.config = RolloutConfig(model_path="x", max_adapters=2)

    def _members(self) -> dict[int, tuple[Any, EngineInfo]]:
        return {}

    @property
    def lost_engines(self) -> dict[int, RLBackendError]:
        return {}

    def _lose(self, engine: int, actor: Any, error: RLBackendError) -> None: ...

    def chosen(self, adapter: str | Sequence[str | None] | None, prompts: int) -> Any:
        return self._chosen(adapter, prompts)


def test_requests_name_one_tenant_or_one_for_each_prompt() -> None:
    group = Group()
    poet, clerk = version("poet", 1), version("clerk", 2)
    for adapter in (poet, clerk):
        assert group.switch_adapter(PushedAdapter(adapter, FACTORS, "")) is None
    assert group.chosen(None, 2) is None
    assert group.chosen("poet", 2) == [poet, poet]
    assert group.chosen(["clerk", None], 2) == [clerk, None]
    with pytest.raises(BatchError, match="adapter has 1 names for 2 prompts"):
        group.chosen(["poet"], 2)
    with pytest.raises(RolloutError, match="adapter='nobody' has not been pushed to these engines; there are clerk, poet"):
        group.chosen(["poet", "nobody"], 2)


def test_no_tenant_goes_back_to_an_older_version_and_none_is_served_beside_merged_weights() -> None:
    group = Group()
    group.switch_adapter(PushedAdapter(version("poet", 1, of_tenant=5), FACTORS, ""))
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
    group = Group()
    group.switch_adapter(PushedAdapter(version("poet", 1), FACTORS, ""))

    def ask() -> Any:
        with group._lock:  # as `submit` does
            return group.chosen("poet", 1)

    def push() -> None:
        with group.changing_adapters():
            order.append("another push")

    def update() -> None:
        with group.updating():
            order.append("an update")

    order: list[str] = []
    with ThreadPoolExecutor(3) as threads:
        with group.changing_adapters():
            assert threads.submit(ask).result(10) == [version("poet", 1)]
            others = [threads.submit(push), threads.submit(update)]
            # The push itself makes the version that requests get.
            assert group.switch_adapter(PushedAdapter(version("poet", 2, of_tenant=2), FACTORS, "")) is not None
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
    group = Group()
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


class Called(Group):
    """Two engines that answer what they are told to."""

    def __init__(self, outcomes: dict[int, Any]) -> None:
        super().__init__()
        self.outcomes = outcomes
        self.calls: list[tuple[Any, ...]] = []

    def start_call(self, method: str, *args: Any, each: Any = None) -> dict[int, Any]:
        self.calls.append((method, *args, dict(self.adapters)))
        return {engine: f"call of {engine}" for engine in self.outcomes}

    def gather(self, calls: dict[int, Any], timeout: float = 600.0) -> dict[int, Any]:
        return self.outcomes


@pytest.mark.parametrize("outcomes", [{0: None, 2: None}, {0: None, 2: RolloutError("engine 2 cannot")}])
@pytest.mark.parametrize("shared", [True, False])
def test_a_tenant_that_is_removed_is_refused_before_engines_drop_it_and_leaves_nothing(
    outcomes: dict[int, Any], shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, pusher = Called(outcomes), Pusher()
    freed: list[tuple[str, list[Any]]] = []
    monkeypatch.setattr(group.adapter_memory, "give_back", lambda path, calls: freed.append((path, list(calls))))
    folder = tmp_path / "version"
    folder.mkdir()
    (folder / "adapter.safetensors").write_text("factors")
    poet, clerk = version("poet", 1), version("clerk", 2)
    factors = SharedFactors(Segment("of the poet", 64), FACTORS.layout) if shared else str(folder)
    group.switch_adapter(PushedAdapter(poet, factors, ""))
    group.switch_adapter(PushedAdapter(clerk, FACTORS, ""))
    group.require_same_tenant("poet", "this one", pusher)
    if outcomes[2] is None:
        group.remove_adapter("poet")
    else:
        with pytest.raises(RolloutError, match="engine 2 cannot"):
            group.remove_adapter("poet")
    assert group.calls == [("drop_adapter", poet, {"clerk": clerk})]
    assert freed == ([("of the poet", ["call of 0", "call of 2"])] if shared else []) and folder.exists() == shared
    with pytest.raises(RolloutError, match="adapter='poet' has not been pushed to these engines; there are clerk"):
        group.remove_adapter("poet")
    group.require_same_tenant("poet", "another one", Pusher())


def test_factors_in_shared_memory_go_through_ray_to_other_hosts_alone() -> None:
    group, segment = Group(), SharedSegment(FACTORS.values.nbytes)
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
