"""Every change to vLLM's own behaviour, in one place. Each is for CPU engines of vLLM 0.30 and does nothing with CUDA.

vLLM's CPU kernels keep packed copies of weights, made when a model is first loaded. A weight update writes the parameters,
but not these copies:

* ``lm_head`` tied to the embedding has a packed copy of its own; only the embedding module is loaded, so the copy stays old;
* a mixture-of-experts layer packs its experts only while its ``moe_kernel`` is unset, that is, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform


@contextmanager
def packing_experts_again(model: nn.Module) -> Iterator[None]:
    """Experts that are loaded inside the context are packed again; those that are not keep their kernel."""
    methods = [module.quant_method for module in _modules_of(model, UnquantizedFusedMoEMethod)]
    kernels = [method.moe_kernel for method in methods]
    for method in methods:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in zip(methods, kernels, strict=True):
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def pack_embeddings_again(model: nn.Module) -> None:
    """Makes the packed copies of embeddings and (tied) heads from the parameters as they are now."""
    for module in _modules_of(model, UnquantizedEmbeddingMethod):
        module.quant_method.process_weights_after_loading(module)


def _modules_of(model: nn.Module, method: type) -> list[Any]:
    if not current_platform.is_cpu():
        return []
    return [module for module in model.modules() if isinstance(getattr(module, "quant_method", None), method)]
