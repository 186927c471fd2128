"""What families read where every field has a value of its own: no two are equal, and none is a default."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.contracts import IndexedLayers, RoutedLayers
from rl_backend.model import find_model
from rl_backend.model.blocks import LayerSpec
from rl_backend.model.decoder_spec import DecoderSpec, MTPNames, MTPSpec
from rl_backend.model.feedforward.dense import MLPNames, MLPSpec, SwiGLUSpec
from rl_backend.model.feedforward.moe import ExpertNames, MoESpec
from rl_backend.model.mixers.deltanet import DeltaNetSpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.mixers.mla import ChosenKeysSpec, IndexerSpec, MLASpec
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import LinearScaling, Rotary, YarnScaling, yarn_attention_factor
from rl_backend.primitive.router import RouterSettings

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 60,
    "intermediate_size": 19,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 99,
    "rope_theta": 77.0,
}
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
    "linear_conv_kernel_dim": 5,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 0.02,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 11,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 13,
    "shared_expert_intermediate_size": 17,
}
SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 5,
    "n_shared_experts": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.75,
}
SCORED = RouterSettings(
    8, 3, score="sigmoid", normalise=False, scaling_factor=1.75, expert_bias=True, groups=4, chosen_groups=2
)
SHARED = MoESpec(SCORED, 5, ExpertNames(shared="shared_experts"), shared_intermediate_size=15)


def parse(model_type: str, *given: dict[str, Any], **fields: Any) -> DecoderSpec:
    whole: dict[str, Any] = {**SIZES}
    for each in (*given, fields):
        whole |= each
    whole = {"model_type": model_type, **whole}
    decoder = find_model("auto", whole).parse_config(whole)
    assert isinstance(decoder, DecoderSpec)
    assert (decoder.vocab_size, decoder.hidden_size, decoder.num_layers) == (53, 60, 4)
    return decoder


def attention(**changes: Any) -> GQASpec:
    fields = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "rotary": Rotary(8, 77.0), **changes}
    return GQASpec(**fields)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"])
def test_hybrids(kind: str) -> None:
    by_key_head, dense = kind == "qwen3_next", kind == "qwen3_5_text"
    own = {"norm_topk_prob": False, "decoder_sparse_step": 2} if by_key_head else {}
    decoder = parse(kind, HYBRID, {} if dense else EXPERTS, own)
    linear = DeltaNetSpec(num_key_heads=2, num_value_heads=10, key_dim=7, value_dim=9, conv_width=5, by_key_head=by_key_head)
    whole = attention(rotary=Rotary(4, 77.0), qk_norm=True, output_gate=True)
    router = RouterSettings(11, 3, normalise=not by_key_head, rounded_logits=True)
    mixture = MoESpec(router, 13, shared_intermediate_size=17, shared_gate=True)
    blocks: list[Any] = [SwiGLUSpec(19), mixture] * 2 if by_key_head else [SwiGLUSpec(19) if dense else mixture] * 4
    assert decoder.layers == tuple(map(LayerSpec, [linear, whole] * 2, blocks))
    assert decoder.norm == NormSpec(0.02, from_one=True) and decoder.max_length == 99
    expected = None if dense else RoutedLayers(11, 3, (False, True) * 2 if by_key_head else (True,) * 4)
    assert decoder.routed_layers == expected


def test_a_hybrid_takes_its_kinds_where_they_are_listed() -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    decoder = parse("qwen3_5_text", HYBRID, layer_types=kinds)
    assert [isinstance(layer.mixer, GQASpec) for layer in decoder.layers] == [True, False, False, True]
    without = parse("qwen3_next", HYBRID, EXPERTS, mlp_only_layers=[1, 2])
    assert without.sparse == (True, False, False, True)


def test_gpt_oss() -> None:
    fields = {"num_local_experts": 9, "num_experts_per_tok": 3, "experts_per_token": 3, "sliding_window": 6}
    router = RouterSettings(9, 3, score_after_top_k=True, bias=True, rounded_logits=True)
    mixture = MoESpec(router, 19, ExpertNames(router="router"), clamped=True)
    yarn = YarnScaling(32.0, 4096, yarn_attention_factor(32.0), 32.0, 1.0, False)
    for bias in (True, False):
        decoder = parse("gpt_oss", fields, rms_norm_eps=0.02, attention_bias=bias)
        mixers = [
            attention(rotary=Rotary(8, 77.0, yarn), window=window, qkv_bias=bias, output_bias=bias, sinks=True)
            for window in (6, None) * 2
        ]
        assert decoder.layers == tuple(LayerSpec(mixer, mixture) for mixer in mixers)
        assert decoder.norm == NormSpec(0.02) and decoder.max_length == 32 * 4096
    # A scaling of the directory's own takes the place of the published one.
    own = parse("gpt_oss", fields, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert own.layers[0].mixer.rotary == Rotary(8, 77.0, LinearScaling(2.0)) and own.max_length == 198


def test_minimax() -> None:
    decoder = parse(
        "minimax_m2", num_local_experts=10, num_experts_per_tok=3, rotary_dim=6, rms_norm_eps=0.02, tie_word_embeddings=True
    )
    router = RouterSettings(10, 3, score="sigmoid", normalise=True, expert_bias=True)
    names = ExpertNames("block_sparse_moe", "w1", "w3", "w2", "e_score_correction_bias")
    mixer = attention(rotary=Rotary(6, 77.0), qk_norm=True, joint_qk_norm=True)
    assert decoder.layers == (LayerSpec(mixer, MoESpec(router, 19, names)),) * 4
    assert decoder.norm == NormSpec(0.02) and decoder.tie_word_embeddings


def test_mixtral() -> None:
    decoder = parse("mixtral", num_local_experts=10, num_experts_per_tok=3, sliding_window=7, rms_norm_eps=0.02)
    mixture = MoESpec(RouterSettings(10, 3, normalise=True), 19, ExpertNames("block_sparse_moe", "w1", "w3", "w2"))
    assert decoder.layers == (LayerSpec(attention(window=7), mixture),) * 4 and decoder.norm == NormSpec(0.02)


def test_qwen3_moe() -> None:
    decoder = parse("qwen3_moe", EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3], rms_norm_eps=0.02)
    mixture = MoESpec(RouterSettings(11, 3, normalise=False), 13)
    assert [layer.feed_forward for layer in decoder.layers] == [SwiGLUSpec(19), mixture, SwiGLUSpec(19), SwiGLUSpec(19)]
    assert {layer.mixer for layer in decoder.layers} == {attention(qk_norm=True)}


@pytest.mark.parametrize("listed", [False, True])
def test_glm_4_5(listed: bool) -> None:
    kinds: dict[str, Any] = (
        {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]} if listed else {"first_k_dense_replace": 3}
    )
    others = {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.25, "num_nextn_predict_layers": 1}
    decoder = parse("glm4_moe", SIGMOID, kinds, others, rms_norm_eps=0.02)
    mixer = attention(rotary=Rotary(2, 77.0), qkv_bias=True, qk_norm=True)
    dense = SwiGLUSpec(19)
    blocks: list[Any] = [dense, SHARED, dense, SHARED] if listed else [dense, dense, dense, SHARED]
    assert decoder.layers == tuple(LayerSpec(mixer, block) for block in blocks) and decoder.norm == NormSpec(0.02)
    assert decoder.mtp == MTPSpec(LayerSpec(mixer, SHARED), MTPNames.after_layers("model", 4))


LATENT: dict[str, Any] = {
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 7,
    "kv_lora_rank": 12,
    "q_lora_rank": 9,
    "num_key_value_heads": 6,
    "head_dim": None,
    "attention_bias": True,
    "rms_norm_eps": 0.02,
    "first_k_dense_replace": 2,
}


def latent(**changes: Any) -> MLASpec:
    fields = {
        "num_heads": 6,
        "query_rank": 9,
        "kv_rank": 12,
        "plain_dim": 10,
        "value_dim": 7,
        "rotary": Rotary(6, 77.0),
        "interleaved": True,
        "scale": 0.25,
        "latent_eps": 1e-6,
        "bias": True,
        **changes,
    }
    return MLASpec(**fields)


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k2", "glm4_moe_lite"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_latent_attention(kind: str, interleaved: bool) -> None:
    decoder = parse(kind, SIGMOID, LATENT, rope_interleave=interleaved)
    blocks: list[Any] = [SwiGLUSpec(19), SwiGLUSpec(19), SHARED, SHARED]
    assert decoder.layers == tuple(LayerSpec(latent(interleaved=interleaved), block) for block in blocks)
    assert decoder.norm == NormSpec(0.02) and decoder.max_length == 99


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_sparse_attention(kind: str, interleaved: bool) -> None:
    index = {"index_n_heads": 3, "index_head_dim": 14, "index_topk": 11, "indexer_rope_interleave": interleaved}
    follows = kind == "glm_moe_dsa"
    kinds = {"indexer_types": ["full", "shared", "shared", "full"]} if follows else {}
    decoder = parse(kind, SIGMOID, LATENT, index, kinds, rope_interleave=False)
    indexer = IndexerSpec(num_heads=3, head_dim=14, rotated=6, interleaved=interleaved)
    full = latent(interleaved=False, keys=ChosenKeysSpec(indexer=indexer, top_k=11))
    shared = latent(interleaved=False, keys=ChosenKeysSpec(indexer=None, top_k=11))
    mixers = [full, shared, shared, full] if follows else [full] * 4
    blocks: list[Any] = [SwiGLUSpec(19), SwiGLUSpec(19), SHARED, SHARED]
    assert decoder.layers == tuple(map(LayerSpec, mixers, blocks))
    assert decoder.indexed_layers == IndexedLayers(11, (0, 3) if follows else (0, 1, 2, 3))


@pytest.mark.parametrize("parameters", [False, True], ids=["of transformers 4", "by kind"])
def test_gemma_3(parameters: bool) -> None:
    """Layers with a window have angles of their own, which no scaling changes; positions are not lengthened."""
    linear = {"rope_type": "linear", "factor": 4.0}
    rotary: dict[str, Any] = {"rope_scaling": linear, "rope_local_base_freq": 33.0}
    if parameters:
        near = {"rope_type": "default", "rope_theta": 33.0}
        rotary = {
            "rope_theta": None,
            "rope_parameters": {"full_attention": {**linear, "rope_theta": 77.0}, "sliding_attention": near},
        }
    decoder = parse(
        "gemma3_text", rotary, sliding_window=7, sliding_window_pattern=2, query_pre_attn_scalar=64, rms_norm_eps=0.02
    )
    own = {"qk_norm": True, "scale": 0.125}
    window = attention(window=7, rotary=Rotary(8, 33.0), **own)
    whole = attention(rotary=Rotary(8, 77.0, LinearScaling(4.0)), **own)
    block = SwiGLUSpec(19, activation="gelu_tanh")
    assert decoder.layers == tuple(LayerSpec(mixer, block) for mixer in (window, whole, window, whole))
    assert (decoder.max_length, decoder.embedding_scale, decoder.norm) == (99, 60**0.5, NormSpec(0.02, from_one=True))
    assert decoder.tie_word_embeddings and not parse("gemma3_text", tie_word_embeddings=False).tie_word_embeddings


def test_granite() -> None:
    factors = {"attention_multiplier": 0.3, "embedding_multiplier": 5.0, "residual_multiplier": 0.7, "logits_scaling": 8.0}
    for qkv, mlp in ((True, False), (False, True)):
        decoder = parse("granite", factors, attention_bias=qkv, mlp_bias=mlp, rms_norm_eps=0.02)
        mixer = attention(scale=0.3, qkv_bias=qkv, output_bias=qkv)
        assert decoder.layers == (LayerSpec(mixer, SwiGLUSpec(19, mlp)),) * 4 and decoder.norm == NormSpec(0.02)
        assert (decoder.embedding_scale, decoder.residual_scale, decoder.logit_scale) == (5.0, 0.7, 0.125)


@pytest.mark.parametrize(
    ("kind", "field", "norm"),
    [
        ("starcoder2", "norm_epsilon", NormSpec(0.02, "layer", bias=True)),
        ("phi", "layer_norm_eps", NormSpec(0.02, "layer", bias=True)),
        ("nemotron", "norm_eps", NormSpec(0.02, "layer", from_one=True, bias=True)),
        ("olmo2", "rms_norm_eps", NormSpec(0.02)),
        ("llama", "rms_norm_eps", NormSpec(0.02)),
        ("gemma", "rms_norm_eps", NormSpec(0.02, from_one=True)),
    ],
)
def test_the_epsilon_of_norms_is_read_from_the_familys_own_field(kind: str, field: str, norm: NormSpec) -> None:
    # Another family's field says nothing.
    others = dict.fromkeys(("norm_epsilon", "layer_norm_eps", "norm_eps", "rms_norm_eps", "layer_norm_epsilon"), 0.5)
    assert parse(kind, others, {field: 0.02}).norm == norm


@pytest.mark.parametrize("qkv", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
def test_biases_of_attention_and_of_dense_blocks_are_apart(qkv: bool, mlp: bool) -> None:
    llama = parse("llama", attention_bias=qkv, mlp_bias=mlp)
    assert llama.layers == (LayerSpec(attention(qkv_bias=qkv, output_bias=qkv), SwiGLUSpec(19, mlp)),) * 4
    nemotron = parse("nemotron", attention_bias=qkv, mlp_bias=mlp, partial_rotary_factor=0.25)
    mixer = attention(rotary=Rotary(2, 77.0), qkv_bias=qkv, output_bias=qkv)
    assert nemotron.layers == (LayerSpec(mixer, MLPSpec(19, "relu2", mlp)),) * 4
    starcoder = parse("starcoder2", use_bias=qkv, sliding_window=7, hidden_act="gelu_new")
    mixer = attention(window=7, qkv_bias=qkv, output_bias=qkv)
    assert starcoder.layers == (LayerSpec(mixer, MLPSpec(19, "gelu_tanh", qkv, MLPNames("c_fc", "c_proj"))),) * 4


def test_all_or_some_features_of_minimax_are_rotated() -> None:
    fields = {"num_local_experts": 10, "num_experts_per_tok": 3}
    for given, rotated in (({"rotary_dim": 8}, 8), ({"rotary_dim": 2}, 2), ({}, 8)):
        assert parse("minimax_m2", fields, given).layers[0].mixer.rotary == Rotary(rotated, 77.0)


@pytest.mark.parametrize(
    ("outside", "inside", "tied"),
    [(None, None, False), (True, None, True), (None, True, True), (False, False, False), (True, True, True)],
)
def test_a_released_directory_is_tied_where_either_part_says_so(
    outside: bool | None, inside: bool | None, tied: bool
) -> None:
    text = {**SIZES, **HYBRID, "tie_word_embeddings": inside}
    whole = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": outside}
    decoder = find_model("auto", whole).parse_config(whole)
    assert decoder.tie_word_embeddings is tied and decoder.prefix == "model.language_model"
    bare = {name: {each: of for each, of in value.items() if of is not None} if name == "text_config" else value
            for name, value in whole.items() if value is not None}  # fmt: skip
    assert find_model("auto", bare).parse_config(bare) == decoder
