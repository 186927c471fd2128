"""What a Mistral ``config.json`` says, and refusal of what this implementation would not honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.model.dense import DenseArchitecture, read_dense, window_of_every_layer
from rl_backend.model.hf_config import HFConfig


def parse_config(hf_config: Mapping[str, Any]) -> DenseArchitecture:
    """Mistral (Jiang et al., arXiv 2310.06825): one sliding window for all layers, or none.

    Raises:
        UnsupportedError: see :func:`~rl_backend.model.dense.read_dense`; biases.
    """
    config = HFConfig(hf_config, "mistral")
    config.require({"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": ()})
    return read_dense(config, windows=window_of_every_layer(config), default_theta=10000.0)
