"""Experts that share a factor train as peft's do with one parameter for all of them, in files and merged weights too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts import ConfigError, OptimizerConfig, TokenSequence, WeightCheckError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.tenants.handle import TenantHandle
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime, relative_difference
from tests.support.peft_reference import apart, load_factors, peft_factors, peft_model, train_with_peft
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import nll

HIDDEN, WIDTH, EXPERTS, RANK = 60, 36, 8, 5
CONFIG = LoRAConfig(rank=RANK, alpha=7.0, targets=("experts", "q_proj"), experts_share_factor=True, seed=3)
EVALUATED = random_token_sequences((17, 40, 9), VOCAB_SIZE, 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
    path = tmp_path_factory.mktemp("models") / "qwen3_moe"
    return write_tiny("qwen3_moe", path, norm_topk_prob=True, tie_word_embeddings=False, **changes)


@pytest.fixture
def runtime(model: Path) -> Iterator[NativeRuntime]:
    with open_runtime(model) as opened:
        yield opened


@pytest.fixture
def base(runtime: NativeRuntime) -> NativeHandle:
    return runtime.build_model(trainable=False)


def step(runtime: NativeRuntime, tenant: TenantHandle, rows: list[TokenSequence]) -> float:
    tokens = float(sum(len(row.input_ids) for row in rows))
    result = runtime.forward_backward(tenant, [pack(rows, {"batch_num_tokens": tokens, "dp_size": 1})], nll)
    return float(sum(result.losses))


def filled(runtime: NativeRuntime, base: NativeHandle, config: LoRAConfig = CONFIG) -> TenantHandle:
    """A tenant whose factors are all away from zero."""
    tenant = runtime.create_lora_adapter(base, config)
    generator = torch.Generator().manual_seed(1)
    given = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in tenant.saved_shapes.items()}
    runtime.import_lora_adapter(tenant, given)
    return tenant


def log_probs(runtime: NativeRuntime, handle: Any) -> Tensor:
    return torch.cat(list(runtime.forward_backward(handle, [pack(EVALUATED)], None, forward_only=True).output("log_probs")))


def test_factors_are_stacked_as_vllm_names_them(runtime: NativeRuntime, base: NativeHandle) -> None:
    tenant = runtime.create_lora_adapter(base, CONFIG)
    exported = dict(runtime.export_lora_adapter(tenant))
    block = "base_model.model.model.layers.1.mlp.experts"
    shapes = {name.removeprefix(block): tuple(each.shape) for name, each in exported.items() if name.startswith(block)}
    assert shapes == {
        ".w1.lora_A.weight": (1, RANK, HIDDEN),
        ".w1.lora_B.weight": (EXPERTS, WIDTH, RANK),
        ".w3.lora_A.weight": (1, RANK, HIDDEN),
        ".w3.lora_B.weight": (EXPERTS, WIDTH, RANK),
        ".w2.lora_A.weight": (EXPERTS, RANK, WIDTH),
        ".w2.lora_B.weight": (1, HIDDEN, RANK),
    }
    assert f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj" in tenant.modules
    for end in shapes:
        first = exported[block + end]
        assert bool(first.any()) is ("lora_A" in end) and first.abs().max() <= 1 / (WIDTH if "w2" in end else HIDDEN) ** 0.5
    downs = exported[f"{block}.w2.lora_A.weight"]
    assert len({tuple(each.flatten().tolist()) for each in downs}) == EXPERTS


@pytest.mark.shows("lora: experts that share a factor have the gradients of torch with one parameter for all, to 1e-5")
@pytest.mark.parametrize("lengths", [(17, 9), (3,)], ids=["several", "few tokens"])
def test_gradients_are_those_of_one_parameter_for_all_experts(
    runtime: NativeRuntime, base: NativeHandle, model: Path, lengths: tuple[int, ...]
) -> None:
    tenant = filled(runtime, base)
    rows = [TokenSequence(each.input_ids) for each in random_token_sequences(lengths, VOCAB_SIZE, 5)]
    rows.append(TokenSequence(torch.tensor([7])))
    loss = step(runtime, tenant, rows)
    found = apart(dict(runtime.export_gradients(tenant)))
    wrapped = peft_model(model, CONFIG)
    load_factors(wrapped, dict(runtime.export_lora_adapter(tenant)))
    expected = torch.zeros(())
    for row in rows:
        each = torch.log_softmax(wrapped(row.input_ids[None]).logits[0].float(), -1)
        expected = expected - each[:-1].gather(1, row.input_ids[1:, None]).sum() / (sum(lengths) + 1)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, factor in peft_factors(wrapped).items():
        wanted = torch.zeros_like(factor) if factor.grad is None else factor.grad
        assert relative_difference(found[name], wanted) < 1e-5, name
    idle = [name for name, value in found.items() if not value.any()]
    assert bool(idle) is (lengths == (3,)), "a few tokens leave experts without any"
    assert all("experts" in name for name in idle)


@pytest.mark.shows("lora: experts that share a factor train step by step as peft's with one parameter for all of them")
def test_steps_are_those_of_one_parameter_for_all_experts(runtime: NativeRuntime, base: NativeHandle, model: Path) -> None:
    tenant = runtime.create_lora_adapter(base, CONFIG, OptimizerConfig(lr=1e-3))
    wrapped = peft_model(model, CONFIG)
    load_factors(wrapped, dict(runtime.export_lora_adapter(tenant)))
    data = [random_token_sequences((17, 40, 2), VOCAB_SIZE, number) for number in range(4)]
    losses, norms = [], []
    for rows in data:
        losses.append(step(runtime, tenant, rows))
        norms.append(runtime.optimizer_step(tenant).grad_norm)
        runtime.zero_grad(tenant)
    expected = train_with_peft(wrapped, [[row.input_ids for row in rows] for rows in data], 1e-3)
    assert losses == pytest.approx(expected.losses, rel=1e-6)
    assert norms == pytest.approx(expected.norms, rel=1e-5)


def test_merged_weights_and_directories_are_the_adapter(
    runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path
) -> None:
    tenant = filled(runtime, base)
    expected = log_probs(runtime, tenant)
    assert float((log_probs(runtime, base) - expected).abs().max()) > 1e-3
    runtime.save_checkpoint(tenant, tmp_path / "merged", hf=True)
    merged, found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32), list[Tensor]()
    for row in EVALUATED:
        with torch.no_grad():
            each = torch.log_softmax(merged(row.input_ids[None]).logits[0], -1)
        found += [each[:-1].gather(1, row.input_ids[1:, None]).flatten(), torch.zeros(1)]
    assert float((torch.cat(found) - expected).abs().max()) < 1e-5
    write_peft_directory(tmp_path / "adapter", runtime.export_lora_adapter(tenant), CONFIG, str(model))
    again = runtime.create_lora_adapter(base, CONFIG.replace(seed=9))
    runtime.import_lora_adapter(again, tmp_path / "adapter")
    assert torch.equal(log_probs(runtime, again), expected)
    larger = runtime.create_lora_adapter(base, CONFIG.replace(rank=8, alpha=3.0))
    runtime.import_lora_adapter(larger, tmp_path / "adapter")
    assert float((log_probs(runtime, larger) - expected).abs().max()) < 1e-5
    apart = runtime.create_lora_adapter(base, CONFIG.replace(experts_share_factor=False))
    with pytest.raises(WeightCheckError, match=r"experts\.0\.down_proj\.lora_A\.weight is missing"):
        runtime.import_lora_adapter(apart, tmp_path / "adapter")


def test_what_cannot_share_is_refused_by_name(runtime: NativeRuntime, base: NativeHandle) -> None:
    with pytest.raises(ConfigError, match=r"experts_share_factor=True: no target is an expert; add experts to targets"):
        runtime.create_lora_adapter(base, CONFIG.replace(targets=("attention",)))
    with pytest.raises(ConfigError, match=r"targets=\('experts\.3\.up_proj',\): has some experts of \S+0\.mlp\.experts\.w3"):
        runtime.create_lora_adapter(base, CONFIG.replace(targets=("experts.3.up_proj",)))
    assert not runtime.list_lora_adapters(base)
