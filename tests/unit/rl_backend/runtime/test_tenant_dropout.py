"""Dropout of a tenant, in every kind of module: losses and gradients are those of peft with the same inputs dropped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import OptimizerConfig
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.primitive.adapters import Factors, dropped
from rl_backend.runtime.tenants.handle import TenantHandle
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.peft_reference import apart, load_factors, peft_factors, peft_model
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import nll

LENGTHS = (21, 40, 18)
TOKENS = sum(LENGTHS[1:])
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
CASES: Mapping[str, tuple[str, LoRAConfig]] = {
    "linear layers": ("qwen3", LoRAConfig(rank=4, alpha=24.0, targets=("attention", "feed_forward"), seed=5)),
    "magnitudes": ("qwen3", LoRAConfig(rank=4, alpha=24.0, targets=("attention", "down_proj"), use_dora=True, seed=6)),
    "experts": ("qwen3_moe", LoRAConfig(rank=20, alpha=9.0, targets=("experts",), use_rslora=True, seed=7)),
    "experts that share a factor": (
        "qwen3_moe",
        LoRAConfig(rank=5, alpha=9.0, targets=("experts",), experts_share_factor=True, seed=4),
    ),
    "magnitudes of experts": ("qwen3_moe", LoRAConfig(rank=4, targets=("experts",), use_dora=True, seed=8)),
    "embedding and head": ("qwen3_moe", LoRAConfig(rank=4, alpha=6.0, targets=("embedding", "head"), seed=9)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"qwen3": write_tiny("qwen3", folder / "qwen3"), "qwen3_moe": write_tiny("qwen3_moe", folder / "moe", **MIXTURE)}


class Dropped(nn.Module):
    """In the place of peft's dropout: drops what a tenant's module drops in a micro-batch."""

    def __init__(self, factors: Factors) -> None:
        super().__init__()
        self.factors, self.draw = factors, 0

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        return dropped(x.flatten(0, -2), self.draw, self.factors).view(shape)


def reference_of(model: Path, tenant: TenantHandle, start: Mapping[str, Tensor]) -> tuple[Any, list[Dropped]]:
    """peft's model with the tenant's factors, and what drops its inputs."""
    reference = peft_model(model, tenant.lora).train()
    load_factors(reference, start)
    dropping = []
    for name, module in reference.named_modules():
        own = tenant.rows.modules.get(name.removeprefix("base_model.model."))
        if own is not None:
            dropping.append(Dropped(own))
            module.lora_dropout["default"] = dropping[-1]
    assert len(dropping) == len(tenant.modules)
    return reference, dropping


@pytest.mark.shows(
    "lora: with dropout losses and gradients are peft's, of linear layers, experts, embeddings, heads and DoRA"
)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_pefts_with_the_same_inputs_dropped(models: dict[str, Path], case: str) -> None:
    family, config = CASES[case]
    config = config.replace(dropout=0.4)
    with open_runtime(models[family]) as runtime:
        base = runtime.build_model(trainable=False)
        tenant = runtime.create_lora_adapter(base, config, OptimizerConfig(), name="mine")
        generator = torch.Generator().manual_seed(1)
        start = {
            name: value + 0.05 * torch.randn(value.shape, generator=generator)
            for name, value in runtime.export_lora_adapter(tenant)
        }
        runtime.import_lora_adapter(tenant, start)
        reference, dropping = reference_of(models[family], tenant, start)
        rows = random_token_sequences(LENGTHS, VOCAB_SIZE, 2)
        owners = (-1, tenant.lora_id, tenant.lora_id)
        owned = [
            row.with_fields(sequence_fields={LORA_FIELD: torch.tensor(owner)})
            for row, owner in zip(rows, owners, strict=True)
        ]
        facts = {"tenants": {tenant.lora_id: {"batch_num_tokens": float(TOKENS)}}, "dp_size": 1}
        data = [pack(owned[:2], facts), pack(owned[2:], facts)]
        found = runtime.forward_backward(base, data, {"mine": nll})
        expected = []
        for draw, row in enumerate(rows[1:]):
            for each in dropping:
                each.draw = draw
            log_probs = torch.log_softmax(reference(row.input_ids[None]).logits[0], -1)
            loss = -log_probs[:-1].gather(1, row.input_ids[1:, None]).sum() / TOKENS
            loss.backward()
            expected.append(loss.item())
        assert found.tenants["mine"].losses == pytest.approx(expected, rel=1e-5)
        gradients = apart({name: value.clone() for name, value in runtime.export_gradients(tenant)})
        runtime.zero_grad(tenant)
        with runtime.eval_mode(tenant):
            runtime.forward_backward(base, data, {"mine": nll})
        without = apart(dict(runtime.export_gradients(tenant)))
    for name, factor in peft_factors(reference).items():
        # An expert that no token went to has no gradient in torch.
        wanted = torch.zeros_like(factor) if factor.grad is None else factor.grad
        torch.testing.assert_close(gradients[name], wanted, rtol=2e-4, atol=2e-6)
        assert not wanted.any() or float((gradients[name] - without[name]).norm() / wanted.norm()) > 0.02, name
