"""Random stacks of latent attention and mixtures behind grouped routers, of odd shapes, each determined by its seed."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.random_models import COMMON, RandomModel, draw_rope

FAMILIES = ("deepseek_v3", "glm4_moe_lite")


def draw_latent(seed: int) -> RandomModel:
    """Even seeds give dense models, odd ones mixtures of experts, most behind dense layers."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    heads, layers = rng.choice((1, 2, 3, 4, 5, 7)), rng.randint(1, 4)
    settings: dict[str, Any] = {
        "vocab_size": rng.randint(61, 6007),
        "hidden_size": rng.randint(24, 260),
        "intermediate_size": rng.randint(17, 400),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": rng.choice((None, rng.randint(9, 90), rng.randint(9, 90))),
        "kv_lora_rank": rng.randint(9, 130),
        "qk_nope_head_dim": rng.randint(3, 70),
        "qk_rope_head_dim": 2 * rng.randint(2, 20),
        "v_head_dim": rng.randint(5, 70),
        "rope_interleave": rng.random() < 0.8,
        "attention_bias": rng.random() < 0.25,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice((1e-5, 1e-6, 3e-6)),
        "rope_parameters": _rope(rng),
        **COMMON,
    }
    dense = layers
    if seed % 2:
        dense = rng.randrange(layers)
        settings |= _experts(rng)
    if family == "deepseek_v3":
        settings["first_k_dense_replace"] = dense
    else:
        settings["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    return RandomModel(family, settings)


def _rope(rng: random.Random) -> dict[str, Any]:
    rope = draw_rope(rng)
    if rope["rope_type"] != "yarn" or rng.random() < 0.3:
        return rope
    return {**rope, "mscale": rng.choice((1.0, 0.7)), "mscale_all_dim": rng.choice((1.0, 0.8))}


def _experts(rng: random.Random) -> dict[str, Any]:
    """At least two experts for a token: the weight of a single one that is normalised has no gradient but rounding."""
    groups, size = rng.choice((1, 1, 2, 3, 4)), rng.randint(2, 5)
    chosen = rng.randint(1, groups)
    return {
        "n_group": groups,
        "topk_group": chosen,
        "n_routed_experts": groups * size,
        "num_experts_per_tok": rng.randint(2, min(6, chosen * size)),
        "moe_intermediate_size": rng.randint(8, 90),
        "n_shared_experts": rng.choice((1, 1, 2, 3)),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice((1.0, 2.5, 1.8)),
    }
