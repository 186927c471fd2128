"""What a Qwen3 ``config.json`` says, and refusal of what this implementation would not honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.model.dense import DenseArchitecture, read_dense, windows_by_layer_type
from rl_backend.model.hf_config import HFConfig


def parse_config(hf_config: Mapping[str, Any]) -> DenseArchitecture:
    """Dense Qwen3 (Qwen3 technical report, arXiv 2505.09388): normalised queries and keys; transformers 4.51 or later.

    Raises:
        UnsupportedError: see :func:`~rl_backend.model.dense.read_dense`; biases.
    """
    config = HFConfig(hf_config, "qwen3")
    config.require({"attention_bias": (False,), "mlp_bias": (False,)})
    return read_dense(config, windows=windows_by_layer_type(config), default_head_dim=128, qk_norm=True)
