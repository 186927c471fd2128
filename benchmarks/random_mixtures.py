"""Random GLM-4.5, gpt-oss and MiniMax-M2 of odd shapes, each determined by its seed."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.random_models import RandomModel, draw_partly_rotated

FAMILIES = ("glm4_moe", "gpt_oss", "minimax_m2")


def draw_mixture(seed: int) -> RandomModel:
    """The families in turn. At least two experts for a token: see :mod:`benchmarks.random_models`."""
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    kv_heads, layers = rng.choice((1, 1, 2, 3, 5)), rng.randint(1, 4)
    part = 1.0 if family == "gpt_oss" else rng.choice((0.5, 0.5, 0.25))
    settings = draw_partly_rotated(rng, layers, kv_heads, part)
    if part != 1.0:
        settings["rope_parameters"]["partial_rotary_factor"] = part
    if part not in (0.5, 1.0):
        # Without this field transformers puts a half beside the rope parameters of GLM, whatever they say.
        settings["partial_rotary_factor"] = part
    match family:
        case "glm4_moe":
            settings |= _glm(rng, layers)
        case "gpt_oss":
            settings |= _gpt_oss(rng, layers)
        case _:
            settings |= _experts(rng)
    return RandomModel(family, settings)


def _experts(rng: random.Random) -> dict[str, Any]:
    experts = rng.randint(2, 12)
    fields = {"num_local_experts": experts, "num_experts_per_tok": rng.randint(2, min(4, experts))}
    return {**fields, "intermediate_size": rng.randint(8, 90)}


def _glm(rng: random.Random, layers: int) -> dict[str, Any]:
    groups, size = rng.choice((1, 1, 2, 3, 4)), rng.randint(2, 5)
    chosen = rng.randint(1, groups)
    return {
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": rng.randint(2, min(4, chosen * size)),
        "n_shared_experts": rng.choice((1, 1, 2)),
        "first_k_dense_replace": rng.randint(0, layers - 1),
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "norm_topk_prob": rng.random() < 0.7,
        "moe_intermediate_size": rng.randint(8, 90),
        "intermediate_size": rng.randint(17, 400),
        "attention_bias": rng.random() < 0.7,
        "use_qk_norm": rng.random() < 0.5,
    }


def _gpt_oss(rng: random.Random, layers: int) -> dict[str, Any]:
    kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    return {**_experts(rng), "sliding_window": rng.randint(3, 60), "layer_types": kinds}
