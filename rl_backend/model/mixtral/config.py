"""What a Mixtral ``config.json`` says, and refusal of what this implementation would not honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.model.dense import full_attention, read_dense, window_of_every_layer
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.moe import MoEArchitecture, num_experts, top_k
from rl_backend.primitive.router import RouterSettings


def parse_config(hf_config: Mapping[str, Any]) -> MoEArchitecture:
    """Mixtral (Jiang et al., arXiv 2401.04088): experts in every layer, a softmax over the chosen ones.

    Raises:
        UnsupportedError: see :func:`~rl_backend.model.dense.read_dense`; biases; noise in the router.
    """
    config = HFConfig(hf_config, "mixtral")
    config.require(
        {"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (), "router_jitter_noise": (0, 0.0)}
    )
    windows = full_attention(config) if config.get("sliding_window") is None else window_of_every_layer(config)
    dense = read_dense(config, windows=windows, default_theta=1e6)
    return MoEArchitecture.of(
        dense,
        # The same weights as a softmax over the chosen logits, computed as transformers and vLLM do.
        router=RouterSettings(num_experts(config), top_k(config), normalise=True),
        expert_intermediate_size=dense.intermediate_size,
        sparse=(True,) * dense.num_layers,
    )
