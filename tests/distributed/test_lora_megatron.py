"""Megatron-Bridge's own LoRA, for one adapter, against a tenant that imports what it has exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import OptimizerConfig
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime import Runtime
from rl_backend.runtime.bridge.model.loading import open_bridge as open_conversion
from tests.support.bridge_runs import open_bridge
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.rank_pool import RankPool
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import nll

type Form = Literal["LoRA", "CanonicalLoRA"]
"""One first factor for the layers that Megatron fuses, or one for each of Hugging Face's."""

RANK, ALPHA = 8, 16
LENGTHS = (17, 40, 9, 2)
CONFIG = LoRAConfig(rank=RANK, alpha=float(ALPHA), targets=("attention", "feed_forward"))


class Found(NamedTuple):
    """Attributes:
    log_probs: of all tokens.
    loss, norm: of a step, before clipping.
    """

    log_probs: Tensor
    loss: float
    norm: float


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "mistral, window of 5": ("mistral", {"sliding_window": 5}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    family, options = MODELS[request.param]
    return str(write_tiny(family, tmp_path_factory.mktemp("models") / family, **options))


def run(runtime: Runtime[Any], handle: Any) -> tuple[Tensor, float]:
    """Log-probs and the loss of a pass; with a backward pass."""
    batch = pack(random_token_sequences(LENGTHS, VOCAB_SIZE, 7), {"batch_num_tokens": float(sum(LENGTHS)), "dp_size": 1})
    result = runtime.forward_backward(handle, [batch], nll)
    return torch.cat(list(result.output("log_probs"))).clone(), result.loss


def megatron_job(model: str, form: Form, directory: str) -> Found:
    """A step of Megatron-Bridge's adapter, which is then written to ``directory`` in peft's format."""
    from megatron.bridge.peft import canonical_lora, lora, utils

    # Without Transformer Engine these are placeholders that no instance can be compared with.
    utils.HAVE_TE, utils.TECL, utils.TERL = False, (), ()
    made: Any = {"LoRA": lora.LoRA, "CanonicalLoRA": canonical_lora.CanonicalLoRA}[form](dim=RANK, alpha=ALPHA)
    with open_bridge(model) as runtime:
        handle = runtime.build_model()
        chunks = handle.models
        before = {id(each) for chunk in chunks for each in chunk.parameters()}
        made(chunks)
        factors = [each for chunk in chunks for each in chunk.parameters() if id(each) not in before]
        generator = torch.Generator().manual_seed(3)
        for factor in factors:
            factor.data.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
        log_probs, loss = run(runtime, handle)
        norm = torch.stack([each.grad.norm() for each in factors if each.grad is not None]).norm()
        open_conversion(model).save_hf_adapter(chunks, directory, made, show_progress=False)
    return Found(log_probs, loss, float(norm))


def tenant_job(model: str, backend: str, directory: str) -> Found:
    with (open_bridge if backend == "bridge" else open_runtime)(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenant = runtime.create_lora_adapter(base, CONFIG, OptimizerConfig(lr=1e-4))
        runtime.import_lora_adapter(tenant, directory)
        log_probs, loss = run(runtime, tenant)
        step = runtime.optimizer_step(tenant)
    return Found(log_probs, loss, step.grad_norm)


@pytest.mark.shows("lora: an adapter of Megatron-Bridge's own LoRA goes on as a tenant, in either runtime")
@pytest.mark.parametrize("form", ["LoRA", "CanonicalLoRA"])
def test_a_tenant_computes_what_megatron_bridges_adapter_computes(
    ranks: RankPool, model: str, form: Form, tmp_path: Path
) -> None:
    directory = str(tmp_path / "adapter")
    expected = ranks.run(megatron_job, model, form, directory, world_size=1)[0]
    for backend in ("native", "bridge"):
        found = ranks.run(tenant_job, model, backend, directory, world_size=1)[0]
        torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=0)
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        if form == "CanonicalLoRA":  # the first factor of fused layers has the sum of their gradients
            assert found.norm == pytest.approx(expected.norm, rel=1e-5)
