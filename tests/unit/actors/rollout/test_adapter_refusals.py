"""Adapters that an engine refuses, and what a group asks of its engines before it shares memory with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rollout.adapter_group import AdapterGroup
from actors.rollout.adapters import AdapterReceiver, lora_request
from actors.rollout.config import RolloutConfig
from actors.rollout.messages import AdapterVersion, EngineInfo, PushedAdapter
from actors.wire.factors import PackedFactors
from actors.wire.segment import host_identity
from rl_backend.contracts import (
    EngineDirtyError,
    RLBackendError,
    RolloutError,
    UnsupportedError,
    WeightCheckError,
    WeightVersionError,
)
from tests.support.answering import Llm

FACTORS = PackedFactors.of({"a": (torch.ones(2, 3), 1.0)}, "float32")
POET, CLERK = AdapterVersion("poet", 5, 1, 8), AdapterVersion("clerk", 7, 2, 4)


def engine_of(monkeypatch: pytest.MonkeyPatch, adapters: int) -> AdapterReceiver:
    monkeypatch.setattr("actors.rollout.adapters.lora_request", lambda adapter: adapter.name)
    made = AdapterReceiver(RolloutConfig(model_path="x", max_adapters=adapters), 6, "cpu")
    made._llm = Llm()
    made._vllm_call = lambda call, *args, **kwargs: call(*args, **kwargs)  # type: ignore[method-assign]
    return made


def test_an_engine_that_cannot_take_adapters_now_or_ever_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without = engine_of(monkeypatch, 0)
    with pytest.raises(UnsupportedError, match=r"engine 6 was started without adapters; set RolloutConfig\.max_adapters"):
        without.push_adapter(POET, FACTORS, FACTORS.digest)
    engine = engine_of(monkeypatch, 1)
    engine._state = "asleep"
    with pytest.raises(RolloutError, match="engine 6 sleeps and cannot take weights"):
        engine.push_adapter(POET, FACTORS, FACTORS.digest)
    engine._state = "dirty"
    with pytest.raises(EngineDirtyError, match="engine 6 is dirty"):
        engine.push_adapter(POET, FACTORS, FACTORS.digest)
    assert not engine._llm.told and not without._llm.told


def test_an_adapter_that_workers_do_not_keep_is_neither_kept_nor_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 1)
    engine._llm.answers["keep_adapter"] = ["rank 9 is more than the 8"]
    with pytest.raises(WeightCheckError, match="engine 6: poet@5#1: rank 9 is more than the 8") as refused:
        engine.push_adapter(POET, FACTORS, "digest")
    assert refused.value.details == {"engine": "engine 6"}
    ((method, path, rank, tensors, digest),) = engine._llm.told
    assert (method, path, rank, list(tensors), digest) == ("keep_adapter", "memory://poet@5#1", 8, ["a"], "digest")
    with pytest.raises(RolloutError, match="engine 6 does not have poet@5#1: push it"):
        engine.load_adapter(POET)


def test_an_adapter_that_vllm_cannot_load_leaves_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 1)
    engine._llm.errors["add_lora"] = ValueError("no slot")
    with pytest.raises(ValueError, match="no slot"):
        engine.push_adapter(POET, FACTORS, "")
    assert engine._llm.told[-1] == ("remove_lora", 1) and not engine._loaded
    engine._llm.errors.clear()
    engine.load_adapter(POET)
    assert list(engine._loaded) == [1]
    engine._unload_all()
    assert engine._llm.told[-1] == ("remove_lora", 1) and not engine._loaded and engine._kept


def test_versions_are_those_of_the_adapter_or_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, 1)
    engine._version = 3
    for adapter, version in ((None, 3), (POET, 5)):
        for required in (None, 0, version):
            engine._require_version(adapter, required)
        with pytest.raises(WeightVersionError, match=f"version {version}, version {version + 1} is required") as older:
            engine._require_version(adapter, version + 1)
        assert older.value.details == {"engine": "engine 6", "version": version, "required": version + 1}


def test_vllm_is_told_of_an_adapter_by_its_name_number_and_path() -> None:
    assert lora_request(None) is None
    request = lora_request(CLERK)
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("clerk@7#2", 2, "memory://clerk@7#2")


class Group(AdapterGroup):
    """Engines 0 and 1 on nodes of the test's choice."""

    def __init__(self, *places: tuple[str, str]) -> None:
        super().__init__()
        self.places = places

    def _members(self) -> dict[int, tuple[Any, EngineInfo]]:
        return {
            engine: (None, SimpleNamespace(node_id=node, host=host))  # type: ignore[misc]
            for engine, (node, host) in enumerate(self.places)
        }

    @property
    def lost_engines(self) -> dict[int, RLBackendError]:
        return {}

    def _lose(self, engine: int, actor: Any, error: RLBackendError) -> None: ...


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
    monkeypatch.setattr("actors.rollout.adapter_group.ray.get_runtime_context", lambda: context)
    hosts = {"here": host_identity(), "elsewhere": "elsewhere"}
    group = Group(*((node, hosts[host]) for node, host in engines))
    assert group.is_on_node(source[0], hosts[source[1]]) is shared


def test_a_tenant_may_be_pushed_at_its_own_version_or_a_newer_one_whatever_others_have() -> None:
    group = Group()
    group.switch_adapter(PushedAdapter(CLERK, None, ""))
    for version in (7, 8):
        group.require_pushable(AdapterVersion("clerk", version, 9, 4))
    group.require_pushable(AdapterVersion("poet", 0, 9, 4))
    with pytest.raises(WeightVersionError) as older:
        group.require_pushable(AdapterVersion("clerk", 6, 9, 4))
    assert older.value.details == {"version": 7, "offered": 6}
    assert group.switch_adapter(PushedAdapter(AdapterVersion("clerk", 8, 9, 4), None, "new")) == (CLERK, None, "")
    assert {tenant: each.version for tenant, each in group.adapters.items()} == {"clerk": 8}
