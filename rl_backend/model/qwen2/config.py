"""What a Qwen2 ``config.json`` says, and refusal of what this implementation would not honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.model.dense import DenseArchitecture, read_dense, windows_by_layer_type
from rl_backend.model.hf_config import HFConfig


def parse_config(hf_config: Mapping[str, Any]) -> DenseArchitecture:
    """Qwen2 (Qwen2 technical report, arXiv 2407.10671): biases in the projections of queries, keys and values.

    Raises:
        UnsupportedError: see :func:`~rl_backend.model.dense.read_dense`.
    """
    config = HFConfig(hf_config, "qwen2")
    config.require({"attention_bias": (True,), "mlp_bias": (False,)})
    return read_dense(config, windows=windows_by_layer_type(config), qkv_bias=True)
