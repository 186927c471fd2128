"""Adapters of an engine: those that it refuses, keeps and loads, and those that give way to others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rollout.config import RolloutConfig
from actors.rollout.engine.adapters import AdapterStore
from actors.rollout.engine.in_process import VllmInProcess, lora_request
from actors.rollout.messages import AdapterVersion
from actors.wire.factors import PackedFactors, SharedFactors
from actors.wire.segment import Segment, SharedSegment
from rl_backend.contracts import EngineDirtyError, RolloutError, WeightCheckError, WeightVersionError
from tests.support.answering import Llm, serve

POET, CLERK = AdapterVersion("poet", 5, 1, 8), AdapterVersion("clerk", 7, 2, 4)
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
        return ["", self.problem if method == "adapter_problem" else ""]


def store_of(llm: Any, engine: int, adapters: int) -> AdapterStore:
    vllm = VllmInProcess(RolloutConfig(model_path="x", max_adapters=adapters), engine, "cpu")
    vllm.call = lambda call, *args, **kwargs: call(*args, **kwargs)  # type: ignore[method-assign]
    vllm.llm = llm
    return AdapterStore(vllm)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> AdapterStore:
    """With room for two adapters and the one that is loaded."""

    def request(adapter: AdapterVersion) -> Any:
        return SimpleNamespace(lora_int_id=adapter.number, lora_path=adapter.path)

    monkeypatch.setattr("actors.rollout.engine.adapters.lora_request", request)
    return store_of(Slots(3), 0, 2)


def keep(engine: AdapterStore, *adapters: AdapterVersion) -> None:
    for adapter in adapters:
        engine.keep(adapter, FACTORS.tensors(), FACTORS.digest)


def test_the_adapter_not_used_for_longest_gives_way_and_comes_back(engine: AdapterStore) -> None:
    adapters = [version(name, number) for number, name in enumerate("abcde", 1)]
    keep(engine, *adapters)
    for adapter in adapters[:3]:
        engine.load(adapter)
    engine.load(adapters[0])
    engine.load(adapters[3])
    assert engine._vllm.llm.held == {1, 3, 4}
    engine.load(adapters[1])
    assert engine._vllm.llm.held == {1, 2, 4}
    engine.drop(adapters[1])
    assert engine._vllm.llm.held == {1, 4} and adapters[1].path not in engine._vllm.llm.kept
    with pytest.raises(RolloutError, match="engine 0 does not have b@1#2: push it"):
        engine.load(adapters[1])


@pytest.fixture
def in_use(engine: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> dict[bool, set[AdapterVersion]]:
    """Adapters of the requests that run (True), and of all (False)."""
    adapters: dict[bool, set[AdapterVersion]] = {True: set(), False: set()}
    monkeypatch.setattr(engine._vllm.loop, "adapters", lambda *, running: adapters[running])
    return adapters


def test_requests_wait_for_a_slot_that_no_running_one_needs(
    engine: AdapterStore, in_use: dict[bool, set[AdapterVersion]]
) -> None:
    a, b, c, d = (version(name, number) for number, name in enumerate("abcd", 1))
    keep(engine, a, b, c, d)
    for adapter in (a, b):
        assert engine.take_slot(adapter)
        in_use[True].add(adapter)
    assert engine.take_slot(a)
    assert not engine.take_slot(c) and engine._vllm.llm.held == {1, 2}
    for pushed in (c, d):  # a push has a slot of its own, in which versions give way to each other
        engine.load(pushed)
        assert engine._vllm.llm.held == {1, 2, pushed.number}
    in_use[True].remove(a)
    assert engine.take_slot(c) and engine._vllm.llm.held == {2, 3, 4}


def test_an_adapter_is_dropped_when_the_last_request_that_samples_with_it_has_left(
    engine: AdapterStore, in_use: dict[bool, set[AdapterVersion]]
) -> None:
    old, new = version("a", 1), version("a", 2, of_tenant=2)
    keep(engine, old, new)
    in_use[False].add(old)
    for adapter in (old, new):
        assert engine.take_slot(adapter)
    engine.drop(old)
    engine.leave_slot(old)
    assert engine._vllm.llm.held == {1, 2}
    in_use[False].clear()
    engine.leave_slot(new)
    assert engine._vllm.llm.held == {1, 2}
    engine.leave_slot(old)
    assert engine._vllm.llm.held == {2} and engine._vllm.llm.kept == {new.path}
    with pytest.raises(RolloutError, match="engine 0 does not have a@1#1: push it"):
        engine.take_slot(old)


def test_of_what_is_dropped_and_in_use_an_engine_has_its_own_copy_of_shared_factors(
    engine: AdapterStore, in_use: dict[bool, set[AdapterVersion]]
) -> None:
    segment = SharedSegment(FACTORS.values.nbytes)
    try:
        shared = SharedFactors(Segment(str(segment.path), segment.nbytes), FACTORS.layout)
        of_ray, idle, busy = version("a", 1), version("b", 2), version("c", 3)
        for adapter, factors in ((of_ray, FACTORS), (idle, shared), (busy, shared)):
            engine.push(adapter, factors, FACTORS.digest)
        in_use[False] |= {of_ray, busy}
        for adapter in (of_ray, idle, busy, busy):
            engine.drop(adapter)
        assert engine._vllm.llm.owned == {busy.path} and engine._vllm.llm.kept == {of_ray.path, busy.path}
    finally:
        segment.close()


def test_what_the_kernels_do_not_hold_is_not_served(engine: AdapterStore) -> None:
    adapter = version("a", 1)
    engine.push(version("b", 1), FACTORS, "of the sender")
    assert engine._vllm.llm.digest == "of the sender", "and not the one that came with the factors"
    engine.drop(version("b", 1))
    engine._vllm.llm.problem = "it was damaged on its way"
    with pytest.raises(WeightCheckError, match="engine 0: a@1#1: it was damaged on its way"):
        engine.push(adapter, FACTORS, FACTORS.digest)
    assert not engine._vllm.llm.held and not engine._loaded


def engine_of(monkeypatch: pytest.MonkeyPatch, adapters: int) -> AdapterStore:
    monkeypatch.setattr("actors.rollout.engine.adapters.lora_request", lambda adapter: adapter.name)
    return store_of(Llm(), 6, adapters)


def test_an_engine_that_cannot_take_adapters_now_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 1)
    engine._vllm.serving.sleep()
    with pytest.raises(RolloutError, match="engine 6 cannot take weights now: it is asleep"):
        engine.push(POET, FACTORS, FACTORS.digest)
    engine._vllm.serving.fail("of vLLM")
    with pytest.raises(EngineDirtyError, match="engine 6 is dirty"):
        engine.push(POET, FACTORS, FACTORS.digest)
    assert not engine._vllm.llm.told


def test_an_adapter_that_workers_do_not_keep_is_neither_kept_nor_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 1)
    engine._vllm.llm.answers["keep_adapter"] = ["rank 9 is more than the 8"]
    with pytest.raises(WeightCheckError, match="engine 6: poet@5#1: rank 9 is more than the 8") as refused:
        engine.push(POET, FACTORS, "digest")
    assert refused.value.details == {"engine": "engine 6"}
    ((method, path, rank, tensors, digest),) = engine._vllm.llm.told
    assert (method, path, rank, list(tensors), digest) == ("keep_adapter", "memory://poet@5#1", 8, ["a", "b"], "digest")
    with pytest.raises(RolloutError, match="engine 6 does not have poet@5#1: push it"):
        engine.load(POET)


def test_an_adapter_that_vllm_cannot_load_leaves_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 1)
    engine._vllm.llm.errors["add_lora"] = ValueError("no slot")
    with pytest.raises(ValueError, match="no slot"):
        engine.push(POET, FACTORS, "")
    assert engine._vllm.llm.told[-1] == ("remove_lora", 1) and not engine._loaded
    engine._vllm.llm.errors.clear()
    engine.load(POET)
    assert list(engine._loaded) == [1]
    engine.unload_all()
    assert engine._vllm.llm.told[-1] == ("remove_lora", 1) and not engine._loaded and engine._kept


def test_versions_are_those_of_the_adapter_or_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 1)
    serve(engine._vllm.serving, 3)
    for adapter, version in ((None, 3), (POET, 5)):
        for required in (None, 0, version):
            engine._vllm.serving.check_version(adapter, required)
        with pytest.raises(WeightVersionError, match=f"version {version}, version {version + 1} is required") as older:
            engine._vllm.serving.check_version(adapter, version + 1)
        assert older.value.details == {"engine": "engine 6", "version": version, "required": version + 1}


def test_vllm_is_told_of_an_adapter_by_its_name_number_and_path() -> None:
    assert lora_request(None) is None
    request = lora_request(CLERK)
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("clerk@7#2", 2, "memory://clerk@7#2")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_in_other_processes_are_sent_factors_and_not_the_memory_that_they_are_views_of(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    engine = engine_of(monkeypatch, 1)
    engine._vllm.config = engine._vllm.config.replace(tensor_parallel=workers)
    tensors = FACTORS.tensors()
    engine.keep(POET, tensors, FACTORS.digest)
    ((_, _, _, sent, _),) = engine._vllm.llm.told
    for name, tensor in tensors.items():
        assert torch.equal(sent[name], tensor)
        assert (sent[name].untyped_storage().nbytes() == tensor.nbytes) == (workers > 1)
        assert (sent[name].data_ptr() == tensor.data_ptr()) == (workers == 1)
