"""What is read from ``config.json`` where Megatron-Bridge assumes it, and the fields that Megatron would not honour."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.bridge.model.provider import (
    _differences_of_experts,
    _differences_of_latents,
    complete_provider,
    complete_rope,
    require_same_model,
)

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 48,
    "rope_parameters": {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GLM: dict[str, Any] = {"model_type": "glm4_moe", "tie_word_embeddings": False, "moe_intermediate_size": 24}
YARN_ANY = {
    "yarn_rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "window_attn_skip_freq": [1, 0, 1],
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "qwen3", "tie_word_embeddings": True}, {}),
        (
            GPT_OSS,
            {
                **YARN_ANY,
                "share_embeddings_and_output_weights": False,
                "yarn_beta_fast": 32.0,
                "yarn_beta_slow": 1.0,
                "yarn_correction_range_round_to_int": True,
                "activation_func_clamp_value": 7.0,
            },
        ),
        (
            {
                **GPT_OSS,
                "tie_word_embeddings": True,
                "swiglu_limit": 5,
                "rope_parameters": {**GPT_OSS["rope_parameters"], "beta_fast": 16, "beta_slow": 2, "truncate": False},
            },
            {
                **YARN_ANY,
                "share_embeddings_and_output_weights": True,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
                "yarn_correction_range_round_to_int": False,
                "activation_func_clamp_value": 5.0,
            },
        ),
        (GLM, {"share_embeddings_and_output_weights": False, "moe_shared_expert_intermediate_size": 24}),
        (
            {**GLM, "n_shared_experts": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "tie_word_embeddings": True},
            {
                "share_embeddings_and_output_weights": True,
                "moe_shared_expert_intermediate_size": 72,
                "moe_layer_freq": [0, 1, 1],
            },
        ),
        # Of the smaller one Megatron-Bridge reads the head itself.
        (
            {**GLM, "model_type": "glm4_moe_lite", "n_shared_experts": 2, "mlp_layer_types": None},
            {"moe_shared_expert_intermediate_size": 48},
        ),
    ],
)
def test_a_family_is_completed_from_its_own_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    provider = SimpleNamespace()
    complete_provider(SimpleNamespace(**fields), provider)
    assert vars(provider) == expected


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"rope_interleave": True, "tie_word_embeddings": False}, []),
        ({"rope_interleave": False, "tie_word_embeddings": False}, ["rope_interleave=False"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings=True"]),
        ({"rope_interleave": False, "tie_word_embeddings": True}, ["rope_interleave=False", "tie_word_embeddings=True"]),
    ],
)
def test_latents_are_refused_where_megatron_rotates_or_shares_them_otherwise(
    fields: dict[str, Any], refused: list[str]
) -> None:
    provider = SimpleNamespace(share_embeddings_and_output_weights=False)
    found = list(_differences_of_latents(SimpleNamespace(**fields), provider))
    assert [each.partition(":")[0] for each in found] == refused
    shared = SimpleNamespace(share_embeddings_and_output_weights=True)
    assert not any("tie_word" in each for each in _differences_of_latents(SimpleNamespace(**fields), shared))


@pytest.mark.parametrize(
    ("groups", "chosen", "top_k", "normalises", "refused"),
    [
        (8, 4, 8, True, ""),
        (8, 8, 5, None, ""),
        (None, None, 4, None, ""),
        (None, None, 1, False, ""),
        (4, 2, 6, True, r"n_group=4, topk_group=2, num_experts_per_tok=6: .*num_experts_per_tok // topk_group = 3 best"),
        (4, 2, 2, True, r"n_group=4, topk_group=2, num_experts_per_tok=2: .* = 1 best"),
        (None, None, 4, False, r"norm_topk_prob=False and num_experts_per_tok=4"),
        (None, None, 1, True, r"norm_topk_prob=True and num_experts_per_tok=1"),
        (None, None, 1, None, r"norm_topk_prob=True and num_experts_per_tok=1"),
    ],
)
def test_sigmoid_scores_are_refused_where_megatron_chooses_or_weighs_otherwise(
    groups: int | None, chosen: int | None, top_k: int, normalises: bool | None, refused: str
) -> None:
    provider = SimpleNamespace(
        num_layers=2,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=groups,
        moe_router_group_topk=chosen,
        moe_router_topk=top_k,
    )
    config = SimpleNamespace(norm_topk_prob=normalises)
    found = list(_differences_of_experts(config, provider))
    assert len(found) == bool(refused) and re.match(refused, "".join(found))
    # Only of sigmoid scores.
    softmax = SimpleNamespace(**{**vars(provider), "moe_router_score_function": "softmax"})
    assert not list(_differences_of_experts(config, softmax))


PROVIDER: dict[str, Any] = {
    "multi_latent_attention": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rope_scaling": False,
    "window_size": None,
    "num_layers": 4,
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "share_embeddings_and_output_weights": False,
    **dict.fromkeys(("yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim")),
    "yarn_correction_range_round_to_int": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
YARN_DEFAULTS = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXTURE = {"num_moe_experts": 8}
WINDOWS = {"window_size": (7, 0)}


@pytest.mark.parametrize(
    ("fields", "provider", "changed"),
    [
        ({}, {}, {}),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}},
            {},
            {"seq_len_interpolation_factor": 2.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {}, {"rotary_percent": 0.5}),
        ({"rope_parameters": YARN}, {"position_embedding_type": "yarn"}, YARN_DEFAULTS),
        (
            {"rope_parameters": YARN},
            {"position_embedding_type": "yarn", "yarn_beta_fast": 16.0, "yarn_mscale_all_dim": 0.5},
            {**YARN_DEFAULTS, "yarn_beta_fast": 16.0, "yarn_mscale_all_dim": 0.5},
        ),
        (
            {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
            {"multi_latent_attention": True, "rotary_percent": 0.5},
            YARN_DEFAULTS,
        ),
        ({"rope_parameters": LLAMA3}, {"rope_scaling": True}, {}),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, {}, {}),
        ({"sliding_window": 8}, {"window_size": (7, 0)}, {}),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, MIXTURE, {}),
        ({"decoder_sparse_step": 2}, {**MIXTURE, "moe_layer_freq": [0, 1, 0, 1]}, {}),
        ({"decoder_sparse_step": 2}, {}, {}),
        ({"norm_topk_prob": False}, {**MIXTURE, "moe_router_pre_softmax": True}, {}),
        ({"norm_topk_prob": True}, MIXTURE, {}),
        # What the family is completed with is another test's.
        (
            {**GPT_OSS, "hidden_size": 48, "intermediate_size": 96},
            {**WINDOWS, "position_embedding_type": "yarn"},
            YARN_DEFAULTS,
        ),
    ],
)
def test_what_megatron_has_too_is_taken(fields: dict[str, Any], provider: dict[str, Any], changed: dict[str, Any]) -> None:
    given = SimpleNamespace(**{**PROVIDER, **provider})
    config = SimpleNamespace(**{"model_type": "qwen3", "tie_word_embeddings": False, **fields})
    complete_rope(config, given)
    require_same_model(config, given)
    assert vars(given) == {**PROVIDER, **provider, **changed}


@pytest.mark.parametrize(
    ("fields", "provider", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "rope parameters"),
        ({"rope_scaling": {"type": "longrope"}}, {}, "rope parameters.*'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {"multi_latent_attention": True}, "rope parameters"),
        ({"rope_parameters": YARN}, {}, "rope parameters"),
        (
            {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
            {"position_embedding_type": "yarn"},
            "rope parameters",
        ),
        ({"rope_parameters": {**YARN, "attention_factor": 0.0}}, {"position_embedding_type": "yarn"}, "rope parameters"),
        ({"rope_parameters": {**YARN, "mscale": 1.0}}, {"multi_latent_attention": True}, "rope parameters"),
        ({"rope_parameters": {**YARN, "truncate": False}}, {"multi_latent_attention": True}, "rope parameters"),
        ({"rope_parameters": LLAMA3}, {}, "rope parameters"),
        ({"rope_parameters": LLAMA3}, {"rope_scaling": True, "multi_latent_attention": True}, "rope parameters"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, {"rope_scaling": True}, "rope parameters"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 2.0}}, {"rope_scaling": True}, "rope parameters"),
        ({"sliding_window": 0, "layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding_window=0"),
        ({"sliding_window": 8}, {}, "sliding_window=8, which Megatron-Bridge does not pass on"),
        (
            {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
            MIXTURE,
            r"decoder_sparse_step=3, mlp_only_layers=\[2\]: layers \[0, 1, 2, 3\] have no experts",
        ),
        ({"decoder_sparse_step": 2}, MIXTURE, r"mlp_only_layers=\[\]: layers \[0, 2\] have no experts"),
        ({"mlp_only_layers": [1]}, MIXTURE, r"decoder_sparse_step=1, mlp_only_layers=\[1\]: layers \[1\] have"),
        ({"norm_topk_prob": False}, MIXTURE, "norm_topk_prob=False, which Megatron-Bridge does not pass on"),
        ({}, {"use_mup": True}, r"scaled logits \(MuP\)"),
        ({"rope_interleave": False}, {"multi_latent_attention": True}, "rope_interleave=False"),
        (
            {"rope_interleave": False, "sliding_window": 8},
            {"multi_latent_attention": True},
            r"^config\.json has sliding_window=8, .*; rope_interleave=False: .*; the native runtime may serve it$",
        ),
        (
            {**GPT_OSS, "hidden_size": 96},
            WINDOWS,
            r"hidden_size=96, twice intermediate_size=48: Megatron-Bridge tells experts",
        ),
        ({**GPT_OSS, "rope_parameters": {"rope_type": "default"}}, WINDOWS, r"'default'\}: Megatron-Bridge gives every"),
        ({**GPT_OSS, "rope_parameters": {"factor": 2.0}}, WINDOWS, r"\{'factor': 2\.0\}: Megatron-Bridge gives every"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(
    fields: dict[str, Any], provider: dict[str, Any], message: str
) -> None:
    given = SimpleNamespace(**{**PROVIDER, **provider})
    config = SimpleNamespace(**{"model_type": "qwen3", "tie_word_embeddings": False, **fields})
    complete_provider(config, given)
    complete_rope(config, given)
    with pytest.raises(UnsupportedError, match=message):
        require_same_model(config, given)


@pytest.mark.parametrize(
    ("fields", "provider", "taken"),
    [
        ({**LLAMA3, "original_max_position_embeddings": 4096}, {"rope_scaling": True}, False),
        ({**YARN, "attention_factor": 1.0}, {"multi_latent_attention": True}, False),
        ({**YARN, "mscale_all_dim": 1.0}, {"multi_latent_attention": True}, False),
        ({**YARN, "mscale": 0.0, "mscale_all_dim": 0.0}, {"multi_latent_attention": True}, True),
        ({**YARN, "truncate": False}, {"position_embedding_type": "yarn"}, True),
        ({**YARN, "mscale": 1.0}, {"position_embedding_type": "yarn"}, True),
        ({"type": "yarn", "factor": 4.0}, {"position_embedding_type": "yarn"}, True),
        ({"rope_type": "default"}, {"multi_latent_attention": True, "rotary_percent": 0.5}, True),
    ],
    ids=str,
)
def test_each_parameter_of_rotary_embeddings_counts_where_megatron_reads_it(
    fields: dict[str, Any], provider: dict[str, Any], taken: bool
) -> None:
    given = SimpleNamespace(**{**PROVIDER, **provider})
    config = SimpleNamespace(model_type="qwen3", tie_word_embeddings=False, rope_parameters=fields)
    complete_rope(config, given)
    if taken:
        require_same_model(config, given)
        return
    with pytest.raises(UnsupportedError, match="rope parameters"):
        require_same_model(config, given)
