"""What a Qwen3-MoE ``config.json`` says, and refusal of what this implementation would not honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.model.dense import read_dense, windows_by_layer_type
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.moe import MoEArchitecture, num_experts, top_k
from rl_backend.primitive.router import RouterSettings


def parse_config(hf_config: Mapping[str, Any]) -> MoEArchitecture:
    """Qwen3-MoE (Qwen3 technical report, arXiv 2505.09388): Qwen3 with experts chosen by a softmax over all of them.

    Every ``decoder_sparse_step``-th layer has experts, except those that ``mlp_only_layers`` names.

    Raises:
        UnsupportedError: see :func:`~rl_backend.model.dense.read_dense`; biases; sliding windows.
    """
    config = HFConfig(hf_config, "qwen3_moe")
    config.require({"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,)})
    router = RouterSettings(num_experts(config), top_k(config), normalise=config.flag("norm_topk_prob"))
    return MoEArchitecture.of(
        read_dense(config, windows=windows_by_layer_type(config), qk_norm=True),
        router=router,
        expert_intermediate_size=config.positive_int("moe_intermediate_size"),
        sparse=_sparse(config),
    )


def _sparse(config: HFConfig) -> tuple[bool, ...]:
    step, dense = config.positive_int("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    layers = range(config.positive_int("num_hidden_layers"))
    if not isinstance(dense, list) or any(isinstance(layer, bool) or layer not in layers for layer in dense):
        config.refuse("mlp_only_layers", dense, f"expected a list of layers from 0 to {layers[-1]}")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in layers)
