"""What a Llama ``config.json`` says, and refusal of what this implementation would not honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.model.dense import DenseArchitecture, full_attention, read_dense
from rl_backend.model.hf_config import HFConfig


def parse_config(hf_config: Mapping[str, Any]) -> DenseArchitecture:
    """Llama (Touvron et al., arXiv 2302.13971, 2307.09288; Grattafiori et al., arXiv 2407.21783).

    ``attention_bias`` puts biases into all four projections of the attention, ``mlp_bias`` into the three of the
    feed-forward block. ``rope_theta`` is 10000 where it is absent, as in Llama 1 and 2.

    Raises:
        UnsupportedError: see :func:`~rl_backend.model.dense.read_dense`.
    """
    config = HFConfig(hf_config, "llama")
    config.require({"rope_interleaved": (False,)})
    attention_bias = config.flag("attention_bias")
    return read_dense(
        config,
        windows=full_attention(config),
        default_theta=10000.0,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
    )
