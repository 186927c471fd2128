"""A tenant trains as peft does on transformers, and adapters go both ways in peft's format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rl_backend.checkpoint.hf_export import TrainingWeights
from rl_backend.checkpoint.peft_files import read_peft_directory, write_peft_directory
from rl_backend.contracts import (
    CheckpointError,
    ConfigError,
    OptimizerConfig,
    TokenSequence,
    UnsupportedError,
    WeightCheckError,
)
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.tenants.handle import TenantHandle
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.peft_reference import load_factors, peft_model, train_with_peft, transformers_model
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import nll

STEPS = 5
LENGTHS = (17, 40, 9)
CONFIGS = {
    "narrow": LoRAConfig(rank=4, alpha=8.0, targets=("attention",)),
    "middle": LoRAConfig(rank=16, targets=("feed_forward", "q_proj"), seed=1),
    "wide": LoRAConfig(rank=64, alpha=16.0, targets=("v_proj", "down_proj"), use_rslora=True, seed=2),
    "magnitudes": LoRAConfig(rank=8, targets=("attention", "down_proj"), use_dora=True, seed=3),
}
AT_ONE_END = {
    "head alone": LoRAConfig(rank=6, alpha=9.0, targets=("head", "o_proj"), seed=4),
    "embedding alone": LoRAConfig(rank=3, targets=("embedding",), use_rslora=True, seed=5),
    "each by itself": LoRAConfig(rank=8, alpha=8.0, targets=("embed_tokens", "lm_head"), seed=6),
}
"""Of dense models, whose head is their embedding."""
OF_MIXTURE = {
    "narrow": LoRAConfig(rank=4, alpha=8.0, targets=("experts", "head")),
    "middle": LoRAConfig(rank=16, targets=("k_proj", "experts"), seed=1),
    "magnitudes": LoRAConfig(rank=8, targets=("attention", "experts"), use_dora=True, seed=3),
    "wide": LoRAConfig(rank=64, alpha=16.0, targets=("embedding", "v_proj", "experts"), use_rslora=True, seed=2),
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.fixture(
    scope="module",
    params=sampled(["qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_5_moe"], "qwen3", "qwen3_moe"),
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    if request.param.startswith("qwen3_5"):
        return write_qwen3_5(path, moe=is_mixture(path))
    return write_tiny(request.param, path, **(MIXTURE if is_mixture(path) else {}))


def is_mixture(model: Path) -> bool:
    return model.name.endswith("_moe")


def configs_of(model: Path) -> dict[str, LoRAConfig]:
    return OF_MIXTURE if is_mixture(model) else CONFIGS


@pytest.fixture
def runtime(model: Path) -> Iterator[NativeRuntime]:
    with open_runtime(model) as opened:
        yield opened


@pytest.fixture
def base(runtime: NativeRuntime) -> NativeHandle:
    return runtime.build_model(trainable=False)


def sequences(tenant: TenantHandle | None, seed: int) -> list[TokenSequence]:
    """Of a tenant, or of the base alone."""
    lora_id = -1 if tenant is None else tenant.lora_id
    rows = random_token_sequences(LENGTHS, VOCAB_SIZE, seed)
    return [row.with_fields(sequence_fields={LORA_FIELD: torch.tensor(lora_id)}) for row in rows]


@pytest.mark.shows("lora: tenants in one batch train step by step as peft does one by one, dense and mixture, with DoRA")
def test_tenants_in_one_batch_train_as_peft_does_one_by_one(runtime: NativeRuntime, base: NativeHandle, model: Path) -> None:
    optimizer, configs = OptimizerConfig(lr=1e-4), configs_of(model) | ({} if is_mixture(model) else AT_ONE_END)
    tenants = {name: runtime.create_lora_adapter(base, config, optimizer, name=name) for name, config in configs.items()}
    models = {name: peft_model(model, config) for name, config in configs.items()}
    for name, tenant in tenants.items():
        load_factors(models[name], dict(runtime.export_lora_adapter(tenant)))
    facts = {tenant.lora_id: {"batch_num_tokens": float(sum(LENGTHS))} for tenant in tenants.values()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in tenants}
    for step in range(STEPS):
        rows = [row for number, tenant in enumerate(tenants.values()) for row in sequences(tenant, 10 * number + step)]
        result = runtime.forward_backward(base, [pack(rows, {"tenants": facts, "dp_size": 1})], dict.fromkeys(tenants, nll))
        for (name, tenant), stepped in zip(tenants.items(), runtime.optimizer_step(list(tenants.values())), strict=True):
            found[name].append((result.tenants[name].loss, stepped.grad_norm))
            runtime.zero_grad(tenant)
    for number, name in enumerate(tenants):
        data = [[row.input_ids for row in sequences(None, 10 * number + step)] for step in range(STEPS)]
        expected = train_with_peft(models[name], data, 1e-4)
        assert [loss for loss, _ in found[name]] == pytest.approx(expected.losses, rel=1e-6)
        assert [norm for _, norm in found[name]] == pytest.approx(expected.norms, rel=1e-5)


def trained(runtime: NativeRuntime, base: NativeHandle, config: LoRAConfig) -> TenantHandle:
    tenant = runtime.create_lora_adapter(base, config, OptimizerConfig(lr=1e-2))
    for step in range(2):
        batch = pack(random_token_sequences(LENGTHS, VOCAB_SIZE, step), {"batch_num_tokens": 10.0, "dp_size": 1})
        runtime.forward_backward(tenant, [batch], nll)
        runtime.optimizer_step(tenant)
        runtime.zero_grad(tenant)
    return tenant


def log_probs(runtime: NativeRuntime, handle: Any) -> torch.Tensor:
    batch = pack(random_token_sequences(LENGTHS, VOCAB_SIZE, 7))
    return torch.cat(list(runtime.forward_backward(handle, [batch], None, forward_only=True).output("log_probs")))


def transformers_log_probs(model: Any) -> torch.Tensor:
    found = []
    for row in random_token_sequences(LENGTHS, VOCAB_SIZE, 7):
        with torch.no_grad():
            logits = torch.log_softmax(model(row.input_ids[None]).logits[0].float(), -1)
        found += [logits[:-1].gather(1, row.input_ids[1:, None]).flatten(), torch.zeros(1)]
    return torch.cat(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_loads_what_a_tenant_exports(
    runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path, name: str
) -> None:
    tenant = trained(runtime, base, configs_of(model)[name])
    write_peft_directory(tmp_path / "adapter", runtime.export_lora_adapter(tenant), tenant.lora, str(model))
    plain = transformers_model(model)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    expected = log_probs(runtime, tenant)
    assert float((transformers_log_probs(loaded) - expected).abs().max()) < 1e-5
    assert float((log_probs(runtime, base) - expected).abs().max()) > 1e-3
    runtime.save_checkpoint(tenant, tmp_path / "merged", hf=True)
    runtime.save_checkpoint(tenant, tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"state.*holds a LoRA tenant, not a model; load it into a tenant"):
        TrainingWeights(tmp_path / "state")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert float((transformers_log_probs(merged) - expected).abs().max()) < 1e-5
    again = runtime.create_lora_adapter(base, tenant.lora.replace(seed=9))
    runtime.import_lora_adapter(again, tmp_path / "adapter")
    assert torch.equal(log_probs(runtime, again), expected)


def test_ranks_and_scales_of_single_modules_are_read(
    runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path
) -> None:
    plain = transformers_model(model)
    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "up_proj"],
        rank_pattern={"up_proj": 8},
        alpha_pattern={"layers.1.*q_proj": 3},
        use_rslora=True,
        init_lora_weights=False,
    )
    theirs = get_peft_model(plain, config)
    theirs.save_pretrained(tmp_path / "adapter")
    tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=8, alpha=16.0, targets=("q_proj", "up_proj")))
    runtime.import_lora_adapter(tenant, tmp_path / "adapter")
    assert float((transformers_log_probs(theirs) - log_probs(runtime, tenant)).abs().max()) < 1e-5
    # Of q_proj there are four ranks more than the directory has: they learn too.
    data = pack(random_token_sequences(LENGTHS, VOCAB_SIZE, 0), {"batch_num_tokens": 1.0, "dp_size": 1})
    runtime.forward_backward(tenant, [data], nll)
    assert all(gradient.any(dim=0).all() for name, gradient in runtime.export_gradients(tenant) if "lora_B" in name)


def test_what_cannot_be_read_is_refused_by_name(
    runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)).save_pretrained(tmp_path / "dora")
    with pytest.raises(UnsupportedError, match=r"use_dora=True, the tenant has LoRAConfig\.rank=\d+ and use_dora=False"):
        runtime.import_lora_adapter(trained(runtime, base, LoRAConfig(rank=4, targets=("q_proj",))), tmp_path / "dora")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj"], bias="all")).save_pretrained(tmp_path / "bias")
    with pytest.raises(UnsupportedError, match="bias='all'"):
        read_peft_directory(tmp_path / "bias")
    with pytest.raises(CheckpointError, match="no adapter in peft's format"):
        read_peft_directory(tmp_path)
    tenant = trained(runtime, base, CONFIGS["narrow"])
    write_peft_directory(tmp_path / "adapter", runtime.export_lora_adapter(tenant), tenant.lora, str(model))
    before = log_probs(runtime, tenant)
    for other, message in (
        (LoRAConfig(rank=2, targets=("attention",)), "has rank 4 .*the tenant has LoRAConfig.rank=2"),
        (LoRAConfig(rank=4, targets=("attention", "embedding" if is_mixture(model) else "feed_forward")), "missing"),
        (LoRAConfig(rank=4, targets=("q_proj",)), "is no tensor of this adapter"),
    ):
        handle = runtime.create_lora_adapter(base, other)
        with pytest.raises((UnsupportedError, WeightCheckError), match=message):
            runtime.import_lora_adapter(handle, tmp_path / "adapter")
    assert torch.equal(log_probs(runtime, tenant), before)


def test_factors_of_packed_experts_are_read(runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path) -> None:
    if not is_mixture(model):
        pytest.skip("no experts")
    for targets, ours in (
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ("gate_proj", "up_proj", "down_proj")),
        (["experts.down_proj"], ("down_proj",)),
    ):
        torch.manual_seed(0)
        theirs = get_peft_model(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            LoraConfig(
                r=4,
                lora_alpha=8,
                target_modules=[],
                target_parameters=targets,
                rank_pattern={r".*\.gate_up_proj": 6},
                init_lora_weights=False,
            ),
        )
        theirs.save_pretrained(tmp_path / ours[0])
        experts = range(theirs.config.num_experts)
        modules = tuple(f"experts.{expert}.{name}" for expert in experts for name in ours)
        tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=8, alpha=16.0, targets=modules))
        runtime.import_lora_adapter(tenant, tmp_path / ours[0])
        assert float((transformers_log_probs(theirs) - log_probs(runtime, tenant)).abs().max()) < 1e-5


def test_what_a_tenant_of_experts_exports_is_read_by_peft_beside_packed_experts(
    runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path
) -> None:
    if model.name != "qwen3_moe":
        pytest.skip("no experts, or of a model type whose packed experts peft does not know")
    tenant = trained(runtime, base, LoRAConfig(rank=4, targets=("experts",)))
    write_peft_directory(tmp_path / "adapter", runtime.export_lora_adapter(tenant), tenant.lora, str(model))
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path / "adapter"
    )
    assert float((transformers_log_probs(loaded) - log_probs(runtime, tenant)).abs().max()) < 1e-5


def test_exported_factors_stay_as_they_are_while_the_tenant_trains_on(
    runtime: NativeRuntime, base: NativeHandle, model: Path
) -> None:
    tenant = trained(runtime, base, next(iter(configs_of(model).values())))
    exported = dict(runtime.export_lora_adapter(tenant))
    before = {name: factor.clone() for name, factor in exported.items()}
    tenant.rows.weights.add_(1.0)
    assert all(torch.equal(exported[name], factor) for name, factor in before.items())
    now = dict(runtime.export_lora_adapter(tenant))
    assert not any(torch.equal(now[name], factor) for name, factor in before.items())


def test_what_cannot_be_adapted_is_refused_by_name(runtime: NativeRuntime, base: NativeHandle, model: Path) -> None:
    if is_mixture(model):
        with pytest.raises(UnsupportedError, match="use_dora=True with lm_head"):
            runtime.create_lora_adapter(base, LoRAConfig(targets=("head",), use_dora=True))
    else:
        with pytest.raises(ConfigError, match="the model has none, or none that can be adapted here"):
            runtime.create_lora_adapter(base, LoRAConfig(targets=("experts",)))
    assert runtime.list_lora_adapters(base) == []


@pytest.mark.parametrize("name", AT_ONE_END)
def test_an_adapter_of_one_end_of_tied_embeddings_is_exported_alone(
    runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path, name: str
) -> None:
    if is_mixture(model):
        pytest.skip("its head is not its embedding")
    tenant = trained(runtime, base, AT_ONE_END[name])
    write_peft_directory(tmp_path / "adapter", runtime.export_lora_adapter(tenant), tenant.lora, str(model))
    loaded = PeftModel.from_pretrained(transformers_model(model), tmp_path / "adapter")
    assert float((transformers_log_probs(loaded) - log_probs(runtime, tenant)).abs().max()) < 1e-5
    loaded.save_pretrained(tmp_path / "theirs")
    again = runtime.create_lora_adapter(base, tenant.lora.replace(seed=9))
    runtime.import_lora_adapter(again, tmp_path / "theirs")
    assert torch.equal(log_probs(runtime, again), log_probs(runtime, tenant))
    merging = (runtime.weight_infos, runtime.export_weights, partial(runtime.save_checkpoint, path=tmp_path / "x", hf=True))
    for merge in merging:
        with pytest.raises(UnsupportedError, match=r"one weight for embedding and head: merged weights could not be"):
            merge(tenant)
    assert not (tmp_path / "x").exists()
    critic = runtime.create_lora_adapter(base, tenant.lora, head="values")
    assert "lm_head.weight" not in {info.name for info in runtime.weight_infos(critic)}


def test_an_adapter_with_other_weights_of_its_base_is_refused(
    runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path
) -> None:
    if not is_mixture(model):
        pytest.skip("the head is the embedding")
    tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=4, targets=("embedding", "q_proj")))
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = get_peft_model(plain, LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]))
    theirs.save_pretrained(tmp_path / "same", save_embedding_layers=True)
    runtime.import_lora_adapter(tenant, tmp_path / "same")
    theirs.base_model.model.model.embed_tokens.base_layer.weight.data[3] += 1.0
    theirs.save_pretrained(tmp_path / "other", save_embedding_layers=True)
    with pytest.raises(UnsupportedError, match="is a whole weight, other than that of"):
        runtime.import_lora_adapter(tenant, tmp_path / "other")
