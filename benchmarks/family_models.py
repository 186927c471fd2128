"""The models with which the families are compared: a small one for exactness, a larger one for speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import parity, train_speed
from benchmarks.random_models import RandomModel, write_model
from tests.support.sparse_models import write_sparse

type Fields = Mapping[str, Any]

_NO_SPECIAL_TOKENS: Fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SMALL: Fields = {**parity.SIZES, **_NO_SPECIAL_TOKENS}
_TIMED: Fields = {**train_speed.MODEL, **_NO_SPECIAL_TOKENS}
_TIMED_MIXTURE: Fields = {"vocab_size": 8192, "num_hidden_layers": 6}
"""As in :mod:`benchmarks.moe_speed`, experts are what is measured, not the head."""

_ROTARY: Fields = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
_HALF_ROTARY: Fields = {**_ROTARY, "partial_rotary_factor": 0.5}
_SHORT_YARN: Fields = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    # vLLM has no defaults for them.
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_SMALL_MIXERS: Fields = {
    # What every engine of the project takes.
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": _ROTARY,
}
_TIMED_MIXERS: Fields = {
    # Values as wide as the hidden state, keys half of that, as in Qwen3.5-9B.
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": _ROTARY,
}
_SMALL_EXPERTS: Fields = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_TIMED_EXPERTS: Fields = {**_TIMED_MIXTURE, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
_SMALL_ROUTED: Fields = {"n_routed_experts": 8, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
_TIMED_ROUTED: Fields = {
    **_TIMED_MIXTURE,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "first_k_dense_replace": 1,
}
_SMALL_LATENTS: Fields = {
    # The only sizes of latents that vLLM's CPU build has, and as many experts as Megatron's groups choose alike.
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    # Where all implementations agree about the norms of latents.
    "rms_norm_eps": 1e-6,
}
_TIMED_LATENTS: Fields = {
    **_TIMED_MIXTURE,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 384,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
}
_GROUPS: Fields = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "tie_word_embeddings": False}
_SPARSE: Fields = {
    # Queries late in the longest sequences read fewer keys than there are. Where two scores at the edge of the choice are
    # equal but for rounding, right implementations part, as with experts: of more queries some would in 20 steps.
    "index_topk": 100,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "tie_word_embeddings": False,
}
_TIMED_SPARSE: Fields = {
    **_TIMED_LATENTS,
    "n_group": 4,
    "topk_group": 2,
    "mlp_layer_types": ["dense", *["sparse"] * 5],
    "tie_word_embeddings": False,
    "index_topk": 128,
    "index_head_dim": 64,
    "index_n_heads": 8,
}
_SERVED_AS_DENSE: Fields = {"index_topk": 256}
"""vLLM serves no other on a CPU."""

_YARN: Fields = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_SMALL_SHARED: Fields = {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 64}
_TIMED_SHARED: Fields = {**_TIMED_EXPERTS, "shared_expert_intermediate_size": 384}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        model_type: transformers' name.
        fields: of both models, beside those that all families share.
        small, timed: of one of them.
        without: shared fields that the family's configuration does not have.
        pushed: of the small model where it is pushed to an engine.
        corrected: what is corrected in transformers before it is compared with; empty where it is right.
        seed: of the random weights of the small model. Where two experts of a mixture are equal to a token but for rounding,
            right implementations part (docs/parity.md).
    """

    model_type: str
    fields: Fields = field(default_factory=dict)
    small: Fields = field(default_factory=dict)
    timed: Fields = field(default_factory=dict)
    without: Sequence[str] = ()
    pushed: Fields = field(default_factory=dict)
    corrected: str = ""
    seed: int = 0

    @property
    def is_mixture(self) -> bool:
        return "num_experts_per_tok" in self.small

    def settings(self, size: Literal["small", "timed"]) -> dict[str, Any]:
        """Fields of transformers' configuration."""
        shared, own = (_SMALL, self.small) if size == "small" else (_TIMED, self.timed)
        common = {name: value for name, value in shared.items() if name not in self.without}
        return {**common, **self.fields, **own}


_NO_HEAD_DIM = ("head_dim",)
FAMILIES: Mapping[str, Family] = {
    "qwen2": Family("qwen2", without=_NO_HEAD_DIM),
    "qwen3": Family("qwen3"),
    "llama": Family("llama"),
    "mistral": Family("mistral", {"sliding_window": None}),
    "gemma": Family("gemma"),
    "gemma3_text": Family(
        "gemma3_text",
        small={"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2},
        timed={"sliding_window": 128, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2},
    ),
    "granite": Family(
        "granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.03, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        without=_NO_HEAD_DIM,
    ),
    "nemotron": Family("nemotron", without=_NO_HEAD_DIM),
    "olmo2": Family("olmo2", without=_NO_HEAD_DIM),
    "phi": Family(
        "phi",
        # vLLM's Phi has neither grouped queries nor a feed-forward width of its own.
        small={"num_key_value_heads": 4, "intermediate_size": 512},
        timed={"num_key_value_heads": 8, "intermediate_size": 2048},
        without=_NO_HEAD_DIM,
    ),
    "starcoder2": Family("starcoder2", without=_NO_HEAD_DIM),
    "qwen3_moe": Family("qwen3_moe", {"norm_topk_prob": True}, _SMALL_EXPERTS, _TIMED_EXPERTS),
    "mixtral": Family(
        "mixtral",
        {"sliding_window": None},
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
        {**_TIMED_MIXTURE, "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 384},
    ),
    "glm4_moe": Family(
        "glm4_moe",
        {"attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": False, "rope_parameters": _HALF_ROTARY},
        {**_SMALL_ROUTED, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
        _TIMED_ROUTED,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {"tie_word_embeddings": False},
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            # Not half the hidden state, by which Megatron-Bridge would take experts for their transposes.
            "intermediate_size": 96,
            "sliding_window": 20,
            "rope_parameters": _SHORT_YARN,
        },
        {
            **_TIMED_MIXTURE,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 384,
            "sliding_window": 128,
            "rope_parameters": _SHORT_YARN,
        },
    ),
    "minimax_m2": Family(
        "minimax_m2",
        {"tie_word_embeddings": False},
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "rope_parameters": _HALF_ROTARY},
        {
            **_TIMED_MIXTURE,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 384,
            "rope_parameters": _HALF_ROTARY,
        },
    ),
    "deepseek_v3": Family(
        "deepseek_v3", _GROUPS, {**_SMALL_LATENTS, "rope_parameters": _YARN}, _TIMED_LATENTS, without=_NO_HEAD_DIM
    ),
    "glm4_moe_lite": Family(
        "glm4_moe_lite", {"tie_word_embeddings": False}, _SMALL_LATENTS, _TIMED_LATENTS, without=_NO_HEAD_DIM
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        # All four layers choose, where GLM-5 has two. On some processors sides part in the 7th step; with 100, in the 12th.
        small={**_SMALL_LATENTS, **_SPARSE, "index_topk": 128},
        without=_NO_HEAD_DIM,
        pushed=_SERVED_AS_DENSE,
        corrected="transformers has no class: its GLM-5, with rotations of neighbours in the attention",
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa",
        small={**_SMALL_LATENTS, **_SPARSE},
        timed=_TIMED_SPARSE,
        without=_NO_HEAD_DIM,
        pushed=_SERVED_AS_DENSE,
        corrected="rotations of neighbours in attention and indexer, as in released models",
    ),
    "qwen3_5": Family("qwen3_5_text", small=_SMALL_MIXERS, timed=_TIMED_MIXERS),
    "qwen3_5_moe": Family(
        "qwen3_5_moe_text",
        small={**_SMALL_MIXERS, **_SMALL_SHARED},
        timed={**_TIMED_MIXERS, **_TIMED_SHARED},
        without=("intermediate_size",),
        # With 0 all three implementations part in the 9th to 12th step.
        seed=1,
    ),
    "qwen3_next": Family(
        "qwen3_next", {"norm_topk_prob": True}, {**_SMALL_MIXERS, **_SMALL_SHARED}, {**_TIMED_MIXERS, **_TIMED_SHARED}
    ),
}
"""Name in ``results/families.json`` -> family. Qwen3.5 is its text model, as transformers writes it."""

SAME_CODE: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Families that transformers has no class of, and the one whose code they are; they are not measured again."""

WITHOUT_SPEED = ("deepseek_v32",)
"""Families whose training is not timed: transformers has no class of them."""


def write_small(family: Family, directory: Path, **changes: Any) -> Path:
    """About 1M random parameters of which none has a value that hides a fault."""
    settings = {**family.settings("small"), **changes}
    if family.corrected:
        return write_sparse(directory, family.model_type, **settings)
    return write_model(RandomModel(family.model_type, settings), family.seed, directory)


def write_timed(family: Family, directory: Path) -> Path:
    """As transformers initialises it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **family.settings("timed"))
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(directory)
    return directory
