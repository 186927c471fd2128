"""A decoder whose layers are of different kinds; importing this module registers its family, ``hybrid``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_backend.contracts import stored_tensors
from rl_backend.model import BuildSettings, register_model
from rl_backend.model.blocks import FeedForwardSpec, LayerSpec
from rl_backend.model.decoder import decoder_family
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families.reading import read_decoder, read_router
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.primitive.rope import Rotary

WINDOW = 12


def read(config: HFConfig) -> DecoderSpec:
    """Every second layer has a window, angles of its own, biases and a dense block; the others see all and have experts."""
    layers = config.positive_int("num_hidden_layers")
    dense = SwiGLUSpec(config.positive_int("intermediate_size"), bias=True)
    mixture = MoESpec(read_router(config, normalise=True), config.positive_int("moe_intermediate_size"))
    blocks: list[FeedForwardSpec] = [mixture if layer % 2 else dense for layer in range(layers)]
    decoder = read_decoder(config, [None] * layers, blocks, qk_norm=True)
    return replace(decoder, layers=tuple(near(layer) if layer.feed_forward is dense else layer for layer in decoder.layers))


def near(layer: LayerSpec) -> LayerSpec:
    """With another kind of attention."""
    assert isinstance(layer.mixer, GQASpec)
    # Fast angles: attention hardly depends on a bias of keys that are hardly turned, and its gradient would be rounding.
    rotary = Rotary(layer.mixer.head_dim, theta=10.0)
    return layer._replace(mixer=replace(layer.mixer, rotary=rotary, window=WINDOW, qkv_bias=True, qk_norm=False))


HYBRID = decoder_family("hybrid", read)
register_model(HYBRID)


def write_hybrid(path: Path, **changes: Any) -> Path:
    """A random directory of the family: four layers, four experts."""
    config = {
        "model_type": "hybrid",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **changes,
    }
    spec = HYBRID.parse_config(config)
    names = HYBRID.weight_names(spec, "log_probs")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for parameter, value in HYBRID.build(spec, BuildSettings(DecoderOptions(), "log_probs", 16)).named_parameters():
        for index, stored in stored_tensors(names[parameter]):
            around = 1.0 if stored.endswith("norm.weight") else 0.0
            tensors[stored] = around + 0.1 * torch.randn(value[index].shape, generator=generator)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
