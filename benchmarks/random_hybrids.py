"""Random stacks of gated DeltaNet and gated attention of odd shapes, each determined by its seed."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.random_models import RandomModel, draw_partly_rotated

DENSE = ("qwen3_5_text",)
MIXTURES = ("qwen3_5_moe_text", "qwen3_next")
_USUAL_PART = 0.25
"""Of a head's features, which rotates."""


def draw_hybrid(seed: int) -> RandomModel:
    """Even seeds give dense models, odd ones mixtures of experts. At least one layer has gated DeltaNet."""
    rng = random.Random(seed)
    family = rng.choice(MIXTURES if seed % 2 else DENSE)
    kv_heads, layers = rng.choice((1, 1, 2, 3, 5)), rng.randint(1, 5)
    part = rng.choice((_USUAL_PART, _USUAL_PART, 0.5, 1.0))
    settings = draw_partly_rotated(rng, layers, kv_heads, part)
    settings["rope_parameters"]["partial_rotary_factor"] = part
    settings |= _mixers(rng, layers)
    if part != _USUAL_PART:
        # Without this field transformers puts a quarter into the rope parameters of Qwen3.5, whatever they say.
        settings["partial_rotary_factor"] = part
    if family != "qwen3_5_moe_text":
        settings["intermediate_size"] = rng.randint(17, 400)
    if family in MIXTURES:
        settings |= _experts(rng, family, layers)
    return RandomModel(family, settings)


def _mixers(rng: random.Random, layers: int) -> dict[str, Any]:
    """One layer has gated DeltaNet; the others have it or attention, in any order."""
    kinds = [rng.choice(("linear_attention", "full_attention")) for _ in range(layers)]
    kinds[rng.randrange(layers)] = "linear_attention"
    key_heads = rng.choice((1, 1, 2, 3, 5))
    return {
        "layer_types": kinds,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice((1, 2, 3)),
        # A key of one or two features is hardly more than a sign once it is normalised.
        "linear_key_head_dim": rng.randint(5, 71),
        "linear_value_head_dim": rng.randint(5, 71),
        "linear_conv_kernel_dim": rng.choice((4, 4, 4, 2, 3)),
    }


def _experts(rng: random.Random, family: str, layers: int) -> dict[str, Any]:
    """At least two experts for a token: the weight of a single one that is normalised has no gradient but rounding."""
    experts = rng.randint(2, 12)
    fields: dict[str, Any] = {
        "num_experts": experts,
        "num_experts_per_tok": rng.randint(2, min(4, experts)),
        "moe_intermediate_size": rng.randint(8, 90),
        "shared_expert_intermediate_size": rng.randint(7, 90),
    }
    if family == "qwen3_next":
        step = rng.choice((1, 1, 1, min(2, layers)))
        dense = [rng.randrange(layers)] if step == 1 and layers > 1 and rng.random() < 0.2 else []
        fields |= {"norm_topk_prob": rng.random() < 0.7, "decoder_sparse_step": step, "mlp_only_layers": dense}
    return fields
