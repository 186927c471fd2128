"""What each family refuses, field by field, and values of other fields that it reads in its own way."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from rl_backend.contracts import ConfigError, UnsupportedError
from rl_backend.model import find_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families.deepseek import LatentDefaults, latent_decoder
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.mixers.mla import MLASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.primitive.rope import YarnScaling
from tests.unit.rl_backend.model.test_left_out_fields import LIKE, written

SMALL = {"num_hidden_layers": 3, "layer_types": None, "mlp_layer_types": None, "indexer_types": None}
NO_BIAS = [("attention_bias", True), ("mlp_bias", True)]
NO_WINDOW = [("sliding_window", 5), ("use_sliding_window", True), ("layer_types", ["sliding_attention"] * 3)]
EVERYWHERE = [("attention_dropout", 0.1), ("pretraining_tp", 2), ("hidden_act", "elu"), ("quantization_config", {"x": 1})]
LATENT = [("scoring_func", "softmax"), ("topk_method", "greedy"), ("moe_layer_freq", 2), ("mlp_bias", True)]
HYBRID = [("attention_bias", True), ("attn_output_gate", False), ("mamba_ssm_dtype", "bfloat16"),
          ("output_gate_type", "tanh"), ("sliding_window", 5), ("use_sliding_window", True),
          ("layer_types", ["sliding_attention"] * 3)]  # fmt: skip
REFUSED: dict[str, list[tuple[str, Any]]] = {
    "qwen2": [("attention_bias", False), ("mlp_bias", True), ("layer_types", ["x"] * 3)],
    "qwen3": [*NO_BIAS, ("layer_types", ["sliding_attention"] * 3)],
    "llama": [("rope_interleaved", True), *NO_WINDOW],
    "mistral": [*NO_BIAS, ("use_sliding_window", True), ("layer_types", ["full_attention"] * 3)],
    "mixtral": [*NO_BIAS, ("router_jitter_noise", 0.1), ("use_sliding_window", False)],
    "qwen3_moe": [*NO_BIAS, ("use_sliding_window", True), ("mlp_only_layers", [3])],
    "gemma": [*NO_BIAS, ("hidden_activation", "gelu"), ("use_bidirectional_attention", True), *NO_WINDOW],
    "gemma3_text": [*NO_BIAS, ("hidden_activation", "gelu"), ("use_bidirectional_attention", True),
                    ("attn_logit_softcapping", 1.0), ("final_logit_softcapping", 1.0), ("layer_types", ["x"] * 3)],
    "granite": NO_WINDOW,
    "olmo2": [("mlp_bias", True), ("clip_qkv", 1.0), *NO_WINDOW],
    "starcoder2": [("residual_dropout", 0.1), ("embedding_dropout", 0.1), ("norm_type", "rms"), ("mlp_type", "gated")],
    "phi": [("resid_pdrop", 0.1), ("embd_pdrop", 0.1), ("qk_layernorm", True), ("tie_word_embeddings", True), *NO_WINDOW],
    "nemotron": NO_WINDOW,
    "glm4_moe": [*LATENT[:3], ("num_nextn_predict_layers", 2), *NO_WINDOW],
    "gpt_oss": [("swiglu_limit", 6.0), ("router_jitter_noise", 0.1), ("experts_per_token", 1), ("layer_types", ["x"] * 3)],
    "minimax_m2": [("attention_bias", True), ("router_jitter_noise", 0.1), ("scoring_func", "softmax"),
                   ("use_routing_bias", False), ("use_qk_norm", False), ("qk_norm_type", "per_head"),
                   ("shared_intermediate_size", 1), ("layernorm_full_attention_beta", 2), ("layernorm_mlp_beta", 2),
                   ("attn_type_list", [1, 0, 1]), ("attn_type_list", 1), ("rotary_dim", 7), *NO_WINDOW],
    "deepseek_v3": [*LATENT, ("num_key_value_heads", 1), ("head_dim", 2), ("qk_head_dim", 3), *NO_WINDOW],
    "kimi_k2": [*LATENT, ("num_key_value_heads", 1), ("num_nextn_predict_layers", 2)],
    "glm4_moe_lite": [*LATENT, ("num_key_value_heads", 1)],
    "deepseek_v32": [*LATENT, ("q_lora_rank", None), ("index_head_dim", 2)],
    "glm_moe_dsa": [*LATENT, ("q_lora_rank", None), ("index_head_dim", 2), ("indexer_types", ["shared", "full", "full"]),
                    ("indexer_types", ["full"] * 2), ("indexer_types", ["full", "x", "full"])],
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": [*HYBRID, ("mlp_only_layers", [0]), ("norm_topk_prob", False), ("decoder_sparse_step", 2)],
    "qwen3_next": [*HYBRID, ("mlp_only_layers", [3])],
}  # fmt: skip


def fields_of(kind: str, **changes: Any) -> dict[str, Any]:
    """transformers' defaults for three layers."""
    fields = {**written(AutoConfig.for_model(LIKE.get(kind, kind)), kind), **SMALL}
    return {**fields, **({"head_dim": 128} if kind == "glm4_moe" else {}), **changes}


def parse(kind: str, **changes: Any) -> DecoderSpec:
    fields = fields_of(kind, **changes)
    decoder = find_model("auto", fields).parse_config(fields)
    assert isinstance(decoder, DecoderSpec)
    return decoder


@pytest.mark.parametrize("kind", REFUSED)
def test_each_field_that_a_family_cannot_honour_is_refused_by_its_name(kind: str) -> None:
    assert parse(kind).num_layers == 3
    family = kind.removesuffix("_text") if kind.startswith("qwen3_5") else kind
    for field, value in [*REFUSED[kind], *EVERYWHERE]:
        with pytest.raises(UnsupportedError) as refused:
            parse(kind, **{field: value})
        assert refused.value.details["field"] == field, (kind, field)
        assert f"in the native {family} family" in str(refused.value)


def mla(decoder: DecoderSpec, layer: int = 0) -> MLASpec:
    mixer = decoder.layers[layer].mixer
    assert isinstance(mixer, MLASpec)
    return mixer


def test_latent_attention_is_read_field_by_field() -> None:
    sizes = {"qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 5, "kv_lora_rank": 7, "q_lora_rank": 9}
    others = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": None,
        "qk_head_dim": 16,
        "attention_bias": True,
    }
    decoder = parse("deepseek_v3", **sizes, **others, rope_interleave=False, rms_norm_eps=0.5)
    found = mla(decoder)
    assert (found.plain_dim, found.rotary.head_dim, found.value_dim, found.kv_rank, found.query_rank) == (10, 6, 5, 7, 9)
    assert (found.num_heads, found.key_dim, found.interleaved, found.bias) == (4, 16, False, True)
    assert (found.latent_eps, decoder.norm.eps) == (1e-6, 0.5) and found.scale == 16**-0.5
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    for changes, temperature in (
        ({}, 1.0),
        ({"mscale": 0.5}, 1.0),
        ({"mscale_all_dim": 0.5}, 0.1 * 0.5 * 2.0794415416798357 + 1),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 0.1 * 2.0794415416798357 + 1),
    ):
        scaled = mla(parse("deepseek_v3", **sizes, **others, rope_parameters={**yarn, **changes}))
        assert isinstance(scaled.rotary.scaling, YarnScaling)
        assert scaled.scale == pytest.approx(16**-0.5 * temperature**2, rel=1e-12)
    # A null rank is a projection without a latent; an absent one is the family's.
    assert mla(parse("deepseek_v3", q_lora_rank=None)).query_rank is None
    fields = fields_of("deepseek_v3")
    del fields["q_lora_rank"]
    defaults = LatentDefaults(groups=(8, 4), dense=1, scale=1.0, eps=1e-6, query_rank=77)
    assert mla(latent_decoder(HFConfig(fields, "some"), defaults)).query_rank == 77


def test_layers_that_follow_have_no_indexer_and_a_draft_layer_has_one() -> None:
    decoder = parse("glm_moe_dsa", indexer_types=["full", "shared", "full"], num_nextn_predict_layers=1, index_topk=5)
    mixers = [layer.mixer for layer in decoder.layers]
    assert all(isinstance(mixer, MLASpec) and mixer.keys is not None and mixer.keys.top_k == 5 for mixer in mixers)
    assert [mixer.follows for mixer in mixers] == [False, True, False]
    assert decoder.mtp is not None and decoder.mtp.layer.mixer == mixers[0]
    first = mixers[0]
    assert isinstance(first, MLASpec) and first.indexer is not None
    assert (first.indexer.interleaved, first.indexer.rotated) == (True, first.rotary.head_dim)
    other = parse("deepseek_v32").layers[1].mixer
    assert isinstance(other, MLASpec) and other.indexer is not None and not other.indexer.interleaved
    for changes in ({"index_topk_freq": 2}, {"index_topk_pattern": "FS"}):
        with pytest.raises(
            UnsupportedError, match="indexer_types=None: index_topk_freq alone is read in two ways; list 3 kinds"
        ):
            parse("glm_moe_dsa", **changes)


def test_options_of_indexers_change_every_layer() -> None:
    fields = fields_of("glm_moe_dsa", indexer_types=["full", "shared", "full"], num_nextn_predict_layers=1)
    family = find_model("auto", fields)
    plain = family.parse_config(fields)
    assert family.architecture(fields, DecoderOptions()) == plain
    for training, part in (("sparse", None), ("warm_up", "indexer")):
        changed = family.architecture(fields, DecoderOptions(indexer=training, indexer_loss_weight=0.25))
        mixers = [*(layer.mixer for layer in changed.layers), changed.mtp.layer.mixer]
        assert {(mixer.keys.training, mixer.keys.loss_weight) for mixer in mixers} == {(training, 0.25)}
        assert changed.trained_part == part and [mixer.follows for mixer in mixers] == [False, True, False, False]
    joint = family.architecture(fields, DecoderOptions(indexer="sparse", mtp="joint"))
    assert joint.mtp.is_trained and joint.mtp.layer.mixer.keys.training == "sparse"
    for options, field in (({"expert_bias_rate": 0.1}, "expert_bias_rate=0.1"), ({"mtp": "joint"}, "mtp='joint'")):
        with pytest.raises(ConfigError, match=rf"model_cfg\.{field}: indexer='warm_up' trains indexers alone"):
            family.architecture(fields, DecoderOptions(indexer="warm_up", **options))
        family.architecture(fields, DecoderOptions(indexer="sparse", **options))


def gqa(decoder: DecoderSpec, layer: int = 0) -> GQASpec:
    mixer = decoder.layers[layer].mixer
    assert isinstance(mixer, GQASpec)
    return mixer


def test_windows_come_in_the_order_of_each_family() -> None:
    six = {"num_hidden_layers": 6, "sliding_window": 9}
    for kind, changes, expected in (
        ("gpt_oss", {}, [9, None] * 3),
        ("gemma3_text", {"sliding_window_pattern": 3}, [9, 9, None] * 2),
        ("gemma3_text", {"layer_types": ["full_attention"] + ["sliding_attention"] * 5}, [None] + [9] * 5),
        ("mixtral", {}, [9] * 6),
        ("starcoder2", {}, [9] * 6),
        ("mistral", {}, [9] * 6),
    ):
        decoder = parse(kind, **six, **changes)
        assert [gqa(decoder, layer).window for layer in range(6)] == expected, kind
    assert gqa(parse("mixtral", sliding_window=None)).window is None
    near, whole = (gqa(parse("gemma3_text", **six, sliding_window_pattern=2), layer).rotary.theta for layer in (0, 1))
    assert (near, whole) == (1e4, 1e6)


def test_what_makes_a_family_its_own_is_read() -> None:
    biased = parse("granite", attention_bias=True, mlp_bias=True, logits_scaling=4.0, residual_multiplier=0.5)
    assert gqa(biased).qkv_bias and gqa(biased).output_bias and (biased.logit_scale, biased.residual_scale) == (0.25, 0.5)
    assert parse("nemotron").norm.from_one and parse("nemotron").norm.bias and parse("nemotron").norm.kind == "layer"
    assert not gqa(parse("starcoder2", use_bias=False)).qkv_bias and gqa(parse("starcoder2")).output_bias
    olmo = parse("olmo2", attention_bias=True)
    assert gqa(olmo).joint_qk_norm and gqa(olmo).qkv_bias and olmo.norms == (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    )  # fmt: skip
    tops = [
        block.router.top_k
        for kind in ("gpt_oss", "mixtral", "minimax_m2", "qwen3_next")
        if isinstance(block := parse(kind, num_experts_per_tok=3).layers[0].feed_forward, MoESpec)
    ]
    assert tops == [3] * 4
    half = gqa(parse("phi"))
    assert half.rotary.head_dim * 2 == half.head_dim
