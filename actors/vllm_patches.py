"""Every change to vLLM's own behaviour, in one place. Each is for CPU engines of vLLM 0.30 and does nothing with CUDA.

vLLM's CPU kernels keep packed copies of weights, made when a model is first loaded. A weight update writes the parameters,
but not these copies:

* ``lm_head`` tied to the embedding has a packed copy of its own; only the embedding module is loaded, so the copy stays old;
* a mixture-of-experts layer packs its experts only while its ``moe_kernel`` is unset, that is, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform


@dataclass(frozen=True)
class PackedKernels:
    """The kernels of mixture-of-experts layers that an update is about to replace."""

    moe_kernels: tuple[tuple[Any, Any], ...] = ()


def before_update(model: nn.Module) -> PackedKernels:
    """Unsets the experts' kernels, so that loading packs the experts again."""
    if not current_platform.is_cpu():
        return PackedKernels()
    return PackedKernels(tuple(_forget_experts_kernel(module) for module in _modules_of(model, UnquantizedFusedMoEMethod)))


def after_update(model: nn.Module, kernels: PackedKernels) -> None:
    """Packs embeddings and tied heads again; gives layers that the update did not load their kernels back."""
    if not current_platform.is_cpu():
        return
    for method, kernel in kernels.moe_kernels:
        if method.moe_kernel is None:
            method.moe_kernel = kernel
    for module in _modules_of(model, UnquantizedEmbeddingMethod):
        module.quant_method.process_weights_after_loading(module)


def _forget_experts_kernel(module: Any) -> tuple[Any, Any]:
    method = module.quant_method
    kernel, method.moe_kernel = method.moe_kernel, None
    return method, kernel


def _modules_of(model: nn.Module, method: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "quant_method", None), method)]
