"""What a trainer sends of a tenant, and how it judges what an engine computes with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.rollout.config import RolloutConfig
from actors.rollout.engine.adapters import AdapterStore
from actors.rollout.engine.in_process import VllmInProcess
from actors.rollout.messages import AdapterVersion
from actors.sync import adapter_push
from actors.sync.adapter_push import describe_source, log_probs_of_trainer, stage_adapter
from actors.sync.push import WeightSync
from actors.train.context import HandleRef, RankContext
from actors.wire.factors import FactorMemories, FactorMemory, PackedFactors, SharedFactors, factor_digest
from actors.wire.segment import Segment, SharedSegment, host_identity
from rl_backend.contracts import ConfigError, UnsupportedError, WeightCheckError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.native import open_runtime

SEQUENCES = [(5, 9, 3, 77, 21), (8, 8, 1)]
ADAPTER = AdapterVersion("poet", 3, 1, 4)


@pytest.fixture(scope="module")
def runtime(untied_model: Path) -> Iterator[NativeRuntime]:
    with open_runtime(untied_model) as opened:
        yield opened


@pytest.fixture
def context(runtime: NativeRuntime) -> RankContext:
    return RankContext(runtime, "group", 0, 1)


@pytest.fixture
def tenant(runtime: NativeRuntime, context: RankContext) -> HandleRef:
    """Of a scale that no power of two is, and with factors that are not 0."""
    config = LoRAConfig(rank=4, alpha=7.0, use_rslora=True, dropout=0.5)
    handle = runtime.create_lora_adapter(runtime.build_model(trainable=False), config)
    torch.manual_seed(0)
    handle.rows.weights.normal_(std=0.3)
    return HandleRef("group", context.keep(handle).ref.key, "poet", False, (0,), (0,), lora_id=handle.lora_id)


def engine_of(model: Path, dtype: str) -> AdapterStore:
    config = RolloutConfig.model_validate({"model_path": str(model), "dtype": dtype, "max_adapters": 1})
    return AdapterStore(VllmInProcess(config, 0, "cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_the_same_to_the_bit_through_memory_shared_memory_and_a_directory(
    context: RankContext,
    tenant: HandleRef,
    untied_model: Path,
    tmp_path: Path,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ray is not running, and only the name of its node is asked of it.
    monkeypatch.setattr("actors.sync.adapter_push.ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n"))
    through_memory = stage_adapter(context, tenant, dtype, None)
    through_a_directory = stage_adapter(context, tenant, dtype, (tmp_path, "key"))
    assert through_memory is not None and through_a_directory is not None
    (in_memory, factors), (in_a_directory, stored) = through_memory, through_a_directory
    assert isinstance(factors, PackedFactors) and stored is None and not in_memory.directory
    assert {value.dtype for value in factors.tensors().values()} == {getattr(torch, dtype)}
    read = PackedFactors.read(in_a_directory.directory, dtype)
    assert read.digest == factors.digest == in_memory.digest == in_a_directory.digest
    assert all(torch.equal(value, factors.tensors()[name]) for name, value in read.tensors().items())
    assert in_memory.nbytes == sum(value.nbytes for value in read.tensors().values())
    source = describe_source(context, tenant, dtype)
    assert source is not None and source.nbytes == in_memory.nbytes and source.host == host_identity()
    segment = SharedSegment(source.nbytes)
    try:
        through_shared_memory = stage_adapter(context, tenant, dtype, Segment(str(segment.path), segment.nbytes))
        assert through_shared_memory is not None and through_shared_memory.stored is None
        staged = through_shared_memory.value
        shared = SharedFactors(Segment(str(segment.path), segment.nbytes), staged.layout)
        assert staged.digest == in_memory.digest and staged.nbytes == in_memory.nbytes
        for found in (shared.tensors(FactorMemories()), shared.packed(FactorMemories(), staged.digest).tensors()):
            assert list(found) == list(factors.tensors())
            assert all(torch.equal(value, factors.tensors()[name]) for name, value in found.items())
            assert factor_digest(found, found.values()) == staged.digest
    finally:
        segment.close()
    gone = stage_adapter(context, tenant, dtype, Segment(str(segment.path), segment.nbytes))
    assert gone is not None and isinstance(gone.stored, PackedFactors) and not gone.value.layout


def test_tenants_of_any_size_are_staged_in_the_same_memory() -> None:
    memory = FactorMemory()
    for rows in (3, 1, 7):
        values = torch.randn(rows, 2)
        for dtype in ("bfloat16", "float32"):
            packed = PackedFactors.pack({"a": values.shape}, [("a", values, 3.0)], dtype, memory)
            assert torch.equal(packed.tensors()["a"], (3.0 * values).to(getattr(torch, dtype)))


def test_factors_of_an_odd_number_of_halves_fit_their_memory() -> None:
    values = torch.randn(3, 1)
    packed = PackedFactors.pack({"a": values.shape}, [("a", values, 1.0)], "bfloat16", FactorMemory(torch.empty(6).byte()))
    assert torch.equal(packed.tensors()["a"], values.bfloat16())


def test_a_digest_is_of_names_shapes_dtypes_and_all_values() -> None:
    named = {"b": torch.ones(3, 2), "a": torch.arange(6.0).view(2, 3)}
    packed = PackedFactors.of({name: (value, 0.5) for name, value in named.items()}, "float32")
    assert not packed.not_finite()
    factors = packed.tensors()
    assert all(torch.equal(factors[name], 0.5 * value) for name, value in named.items())
    assert packed.digest == factor_digest(factors, factors.values())
    parted = [row for factor in factors.values() for row in factor]
    assert packed.digest == factor_digest(factors, parted)
    flipped = [factor.clone() for factor in factors.values()]
    flipped[1].view(torch.uint8)[2, 1] ^= 1
    others = [
        ({"a": factors["a"].t(), "b": factors["b"]}, factors.values()),
        ({"a": factors["a"], "c": factors["b"]}, factors.values()),
        ({"a": factors["a"].to(torch.int32), "b": factors["b"]}, factors.values()),
        (factors, flipped),
        (factors, parted[:-1]),
        (factors, [*parted, torch.zeros(1)]),
        (factors, reversed(factors.values())),
    ]
    assert packed.digest not in [factor_digest(*other) for other in others]


def test_a_factor_that_is_not_finite_is_named() -> None:
    named = {"b": torch.ones(3, 2), "a": torch.ones(2, 3)}
    named["b"][2, 1] = torch.inf
    assert PackedFactors.of({name: (value, 1.0) for name, value in named.items()}, "float32").not_finite() == "b"


def test_the_trainer_computes_log_probs_with_and_without_the_adapter(
    runtime: NativeRuntime, context: RankContext, tenant: HandleRef
) -> None:
    handle = context.handle(tenant)
    found = log_probs_of_trainer(context, tenant, handle.weight_version, SEQUENCES)
    assert found is not None and list(found) == SEQUENCES
    again = log_probs_of_trainer(context, tenant, handle.weight_version, SEQUENCES)
    for ids, (plain, adapted) in found.items():
        assert plain.shape == adapted.shape == (len(ids),) and not torch.equal(plain, adapted)
        assert again is not None and torch.equal(again[ids][1], adapted), "no dropout"
    for change in (1, -1):
        assert log_probs_of_trainer(context, tenant, handle.weight_version + change, SEQUENCES) is None


def judge(plain: Tensor, adapted: Tensor, base: Tensor, tenant: Tensor) -> bool:
    """Of a response of three tokens to a prompt of one."""
    ids = (1, 2, 3, 4)
    pair = [adapter_push._Answer(ids, 1, value) for value in (plain, adapted)]
    padded = tuple(torch.cat([value, torch.zeros(1)]) for value in (base, tenant))
    return adapter_push._judge("engine 0", ADAPTER, pair, {ids: (padded[0], padded[1])}, 1e-5)


def test_a_canary_tells_what_is_wrong() -> None:
    base, tenant = torch.tensor([-2.0, -30.0, -0.5]), torch.tensor([-2.5, -29.0, -0.25])
    assert judge(base, tenant + 1e-6, base, tenant)
    assert not judge(base, base, base, base), "an adapter that changes nothing proves nothing"
    assert judge(base, tenant * (1 + 8e-6), base, tenant), "relative beyond one nat"
    with pytest.raises(WeightCheckError, match="it serves other weights; push the base model"):
        judge(base + 1e-3, tenant, base, tenant)
    with pytest.raises(WeightCheckError, match="has taken the adapter and does not apply it"):
        judge(base, base, base, tenant)
    with pytest.raises(WeightCheckError, match="it is applied wrongly"):
        judge(base, tenant + 1e-3, base, tenant)
    with pytest.raises(WeightCheckError, match="are inf from the trainer's"):
        judge(base, tenant * torch.nan, base, tenant)


class Engines:
    """A group as far as it is looked at before anything is pushed."""

    def __init__(self, max_adapters: int) -> None:
        self.config = RolloutConfig(model_path="model", max_adapters=max_adapters)


@pytest.mark.parametrize(
    ("adapters", "options", "error", "match"),
    [
        (0, {}, UnsupportedError, r"max_adapters=0 serve none; set it, or push .* merged=True"),
        (1, {"transport": "gloo"}, ConfigError, "WeightSync.transport='gloo': .* leave it out"),
        (1, {"byte_budget": 10}, ConfigError, "WeightSync.byte_budget=10"),
        (1, {"merged": True, "directory": "there"}, ConfigError, "WeightSync.directory='there'"),
        (1, {"merged": True, "canary": None}, ConfigError, "WeightSync.canary=None"),
    ],
)
def test_options_without_effect_are_refused_before_anything_is_pushed(
    tenant: HandleRef, adapters: int, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    rollout: Any = Engines(adapters)
    with pytest.raises(error, match=match):
        WeightSync(rollout, rollout, tenant, **options)


def test_options_of_a_tenant_are_refused_for_a_model(tenant: HandleRef) -> None:
    model = HandleRef("group", 0, "policy", False, (0,), (0,))
    rollout: Any = Engines(1)
    for options in ({"merged": True}, {"directory": "there"}, {"canary": None}):
        with pytest.raises(ConfigError, match="it is for a LoRA tenant that is pushed as an adapter; leave it out"):
            WeightSync(rollout, rollout, model, **options)  # type: ignore[arg-type]


class Exports:
    """A rank's runtime with a tenant of known factors."""

    def __init__(self, rank: int = 0, value: float = 1.0, **config: Any) -> None:
        self.rank, self.state, self.runtime = rank, dict[str, Any](), self
        prefix = "base_model.model.m"
        self.factors = {
            f"{prefix}.up.lora_A.weight": torch.full((4, 3), value),
            f"{prefix}.up.lora_B.weight": torch.full((5, 4), 2.0),
            f"{prefix}.words.lora_embedding_A": torch.full((4, 7), 3.0),
            f"{prefix}.words.lora_embedding_B": torch.full((2, 4), 5.0),
        }
        shapes = {name: tuple(factor.shape) for name, factor in self.factors.items()}
        settings = LoRAConfig(rank=4, alpha=12.0, **config)
        self.info = SimpleNamespace(name="ann/poet", config=settings, shapes=shapes, weight_version=7, hf_path="there")
        self.exported = 0

    def handle(self, ref: Any) -> Any:
        return ref

    def get_lora_adapter(self, handle: Any) -> Any:
        return self.info

    def export_lora_adapter(self, handle: Any, *, copy: bool) -> Iterator[tuple[str, Tensor]]:
        assert not copy
        for name, factor in reversed(self.factors.items()):
            self.exported += 1
            yield name, factor


def staged_by(rank: Exports, dtype: str = "float32", place: Any = None) -> Any:
    return stage_adapter(rank, HandleRef("group", 3, "poet", False, (0,), (0,), lora_id=0), dtype, place)  # type: ignore[arg-type]


def test_the_source_rank_alone_stages_what_all_export_with_its_scale_in_b() -> None:
    other, source = Exports(1), Exports()
    assert staged_by(other) is None and other.exported == 4 and not other.state
    assert describe_source(other, None, "float32") is None  # type: ignore[arg-type]
    (staged, packed) = staged_by(source)
    assert (staged.version, staged.rank, staged.nbytes, staged.directory) == (7, 4, 4 * (12 + 20 + 28 + 8), "")
    found = {name.rpartition("m.")[2]: value.unique().tolist() for name, value in packed.tensors().items()}
    assert found == {
        "up.lora_A.weight": [1.0],
        "up.lora_B.weight": [6.0],
        "words.lora_embedding_A": [3.0],
        "words.lora_embedding_B": [15.0],
    }


def test_what_no_engine_can_take_is_refused_before_it_is_sent() -> None:
    dora = Exports(use_dora=True)
    with pytest.raises(UnsupportedError, match=r"'ann/poet' has LoRAConfig\.use_dora=True: .* merged=True"):
        staged_by(dora)
    assert not dora.exported
    large = Exports(value=70000.0)
    assert staged_by(large).value.version == 7 and staged_by(large, "bfloat16").value.version == 7
    with pytest.raises(WeightCheckError, match=r"'ann/poet': \S+up\.lora_A\.weight has values that are not finite"):
        staged_by(large, "float16")


def test_a_directory_has_the_name_of_the_tenant_its_version_and_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(adapter_push, "write_peft_directory", lambda *given: written.append(given))
    source = Exports()
    (staged, stored) = staged_by(source, "bfloat16", (tmp_path, "k3y"))
    ((path, factors, config, model),) = written
    assert path == staged.directory == f"{tmp_path}/ann_poet@7-k3y" and stored is None
    assert {name: value.unique().tolist() for name, value in factors} == {
        name: value.unique().tolist() for name, value in source.factors.items()
    }, "as they are trained: the scale is in the directory's configuration"
    assert (config, model, staged.nbytes) == (source.info.config, "there", 2 * (12 + 20 + 28 + 8))
