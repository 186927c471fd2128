"""DeepSeek-V3 and V3.2, Kimi-K2, GLM-4.7-Flash and GLM-5: latent attention, dense or sparse, and mixtures of experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rl_backend.contracts import ConfigError, ModelOptions
from rl_backend.model.decoder import decoder_family
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families.reading import (
    after_dense_layers,
    full_attention,
    read_decoder,
    read_sigmoid_mixture,
    weights_behind_layers,
    with_draft_layer,
)
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.mixers.mla import ChosenKeysSpec, IndexerSpec, MLASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.model.registry import register_model
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import Rotary, YarnScaling, yarn_temperature

# Of the norms of latents, in DeepSeek's code and in transformers, whatever ``rms_norm_eps`` says. vLLM and Megatron take
# ``rms_norm_eps``, which is the same number in DeepSeek-V3 and Kimi-K2.
_LATENT_EPS = 1e-6


class LatentDefaults(NamedTuple):
    """What fields are that ``config.json`` leaves out: those of the family's class in transformers, which engines read.

    They are ``n_group`` and ``topk_group``, ``first_k_dense_replace``, ``routed_scaling_factor``, ``rms_norm_eps`` and
    ``q_lora_rank``, where null is a projection without a latent.
    """

    groups: tuple[int, int]
    dense: int
    scale: float
    eps: float
    query_rank: int


def deepseek_v3(config: HFConfig) -> DecoderSpec:
    """DeepSeek-V3 and R1 (arXiv 2412.19437)."""
    return latent_decoder(config, LatentDefaults(groups=(8, 4), dense=3, scale=2.5, eps=1e-6, query_rank=1536))


def glm4_moe_lite(config: HFConfig) -> DecoderSpec:
    """GLM-4.7-Flash: DeepSeek-V3 with other sizes; ``mlp_layer_types`` names the dense layers."""
    return latent_decoder(config, LatentDefaults(groups=(1, 1), dense=1, scale=1.8, eps=1e-5, query_rank=768))


def latent_decoder(config: HFConfig, defaults: LatentDefaults, *layer_types: str) -> DecoderSpec:
    """A decoder of latent attention, by these names too, and, behind ``first_k_dense_replace`` layers, mixtures."""
    config.require({"mlp_bias": (False,)})
    heads, rotated = config.positive_int("num_attention_heads"), config.positive_int("qk_rope_head_dim", 64)
    mixture = read_sigmoid_mixture(config, default_groups=defaults.groups, default_scale=defaults.scale)
    kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim", rotated)
    if kv_heads != heads:
        config.refuse("num_key_value_heads", kv_heads, f"all num_attention_heads={heads} have keys of their own")
    if head_dim != rotated:
        config.refuse("head_dim", head_dim, f"stands for what is rotated here; leave it out, or make it {rotated}")
    decoder = read_decoder(
        # What is rotated is all that is read of a head.
        HFConfig({**config.fields, "head_dim": rotated}, config.family),
        full_attention(config, *layer_types),
        after_dense_layers(config, mixture, default_dense=defaults.dense),
        norm=NormSpec(config.positive_float("rms_norm_eps", defaults.eps)),
        default_theta=10000.0,
    )
    rotary = decoder.layers[0].mixer.rotary
    assert rotary is not None, "of read_decoder"
    mixer = _read_mla(config, heads, rotary, defaults.query_rank)
    layers = tuple(layer._replace(mixer=mixer) for layer in decoder.layers)
    return with_draft_layer(config, replace(decoder, layers=layers), mixture)


def _read_mla(config: HFConfig, heads: int, rotary: Rotary, default_query_rank: int) -> MLASpec:
    plain = config.positive_int("qk_nope_head_dim")
    key_dim = plain + rotary.head_dim
    config.require({"qk_head_dim": (key_dim,)})
    without = config.fields.get("q_lora_rank", default_query_rank) is None
    rank = None if without else config.positive_int("q_lora_rank", default_query_rank)
    return MLASpec(
        num_heads=heads,
        query_rank=rank,
        kv_rank=config.positive_int("kv_lora_rank"),
        plain_dim=plain,
        value_dim=config.positive_int("v_head_dim"),
        rotary=rotary,
        interleaved=config.flag("rope_interleave", True),
        scale=key_dim**-0.5 * _temperature(config, rotary) ** 2,
        latent_eps=_LATENT_EPS,
        bias=config.flag("attention_bias"),
    )


def _temperature(config: HFConfig, rotary: Rotary) -> float:
    # DeepSeek's YaRN multiplies queries by it, and keys. ``mscale_all_dim`` is checked with the rotary embedding.
    parameters = config.get("rope_parameters", config.get("rope_scaling", {}))
    if not isinstance(rotary.scaling, YarnScaling) or not parameters.get("mscale_all_dim"):
        return 1.0
    return yarn_temperature(rotary.scaling.factor, float(parameters["mscale_all_dim"]))


# What a layer calls its indexer.
INDEXER = "indexer"
# Names of every layer in ``layer_types``, which older releases of transformers leave out.
_SPARSE_LAYERS = ("indexed_attention", "deepseek_sparse_attention")


def deepseek_v32(config: HFConfig) -> DecoderSpec:
    """DeepSeek-V3.2 (arXiv 2512.02556): an indexer in every layer, which rotates halves; attention rotates neighbours."""
    defaults = LatentDefaults(groups=(8, 4), dense=3, scale=2.5, eps=1e-6, query_rank=1536)
    decoder = latent_decoder(config, defaults, *_SPARSE_LAYERS)
    return _sparse(config, decoder, ["full"] * decoder.num_layers, default_heads=64, default_interleaved=False)


def glm_moe_dsa(config: HFConfig) -> DecoderSpec:
    """GLM-5, 5.1 and 5.2 (arXiv 2602.15763): layers that ``indexer_types`` calls shared follow the one before."""
    defaults = LatentDefaults(groups=(1, 1), dense=3, scale=2.5, eps=1e-5, query_rank=2048)
    decoder = latent_decoder(config, defaults, *_SPARSE_LAYERS)
    kinds = _indexer_types(config, decoder.num_layers)
    return _sparse(config, decoder, kinds, default_heads=32, default_interleaved=True)


def _sparse(
    config: HFConfig, decoder: DecoderSpec, kinds: Sequence[str], *, default_heads: int, default_interleaved: bool
) -> DecoderSpec:
    latent = decoder.layers[0].mixer
    assert isinstance(latent, MLASpec), "of latent_decoder"
    if latent.query_rank is None:
        config.refuse("q_lora_rank", None, "index queries are made of the latent of this rank")
    indexer = IndexerSpec(
        num_heads=config.positive_int("index_n_heads", default_heads),
        head_dim=config.positive_int("index_head_dim", 128),
        rotated=latent.rotary.head_dim,
        interleaved=config.flag("indexer_rope_interleave", default_interleaved),
    )
    if indexer.head_dim < indexer.rotated:
        config.refuse("index_head_dim", indexer.head_dim, f"qk_rope_head_dim={indexer.rotated} features of it are rotated")
    keys = ChosenKeysSpec(indexer=indexer, top_k=config.positive_int("index_topk", 2048))
    full = replace(latent, keys=keys)
    mixers = {"full": full, "shared": replace(latent, keys=replace(keys, indexer=None))}
    stack = zip(decoder.layers, kinds, strict=True)
    layers = tuple(layer._replace(mixer=mixers[kind]) for layer, kind in stack)
    mtp = decoder.mtp and replace(decoder.mtp, layer=decoder.mtp.layer._replace(mixer=full))
    return replace(decoder, layers=layers, mtp=mtp)


def _indexer_types(config: HFConfig, layers: int) -> Sequence[str]:
    kinds = config.get("indexer_types")
    if kinds is None:
        if config.get("index_topk_freq", 1) != 1 or config.get("index_topk_pattern") is not None:
            # vLLM counts from index_skip_topk_offset, and transformers does not.
            config.refuse("indexer_types", None, f"index_topk_freq alone is read in two ways; list {layers} kinds")
        return ["full"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"full", "shared"}:
        config.refuse("indexer_types", kinds, f"expected 'full' or 'shared' for each of num_hidden_layers={layers}")
    if kinds[0] != "full":
        config.refuse("indexer_types", kinds, "the first layer has none before it to follow")
    return tuple(kinds)


def configured(decoder: DecoderSpec, options: ModelOptions) -> DecoderSpec:
    """With what the family's options say of indexers, and of the rest."""
    decoder, chosen = decoder.configured(options), DecoderOptions.of(options)
    if chosen.indexer == "frozen":
        return decoder
    if chosen.indexer == "warm_up":
        _require_indexers_alone(chosen)

    def taught(mixer: Any) -> Any:
        assert isinstance(mixer, MLASpec), "of latent_decoder"
        assert mixer.keys is not None, "of every layer"
        return replace(mixer, keys=replace(mixer.keys, training=chosen.indexer, loss_weight=chosen.indexer_loss_weight))

    layers = tuple(layer._replace(mixer=taught(layer.mixer)) for layer in decoder.layers)
    mtp = decoder.mtp and replace(decoder.mtp, layer=decoder.mtp.layer._replace(mixer=taught(decoder.mtp.layer.mixer)))
    return replace(decoder, layers=layers, mtp=mtp, trained_part=INDEXER if chosen.indexer == "warm_up" else None)


def _require_indexers_alone(options: DecoderOptions) -> None:
    field = "expert_bias_rate" if options.expert_bias_rate else "mtp"
    if options.expert_bias_rate or options.mtp != "keep":
        reason = "indexer='warm_up' trains indexers alone; leave it out, or warm up first"
        raise ConfigError.of(f"NativeConfig.model_cfg.{field}", getattr(options, field), reason)


for family in (
    decoder_family("deepseek_v3", deepseek_v3, weights_behind_layers),
    decoder_family("kimi_k2", deepseek_v3, weights_behind_layers),
    decoder_family("glm4_moe_lite", glm4_moe_lite, weights_behind_layers),
    replace(decoder_family("deepseek_v32", deepseek_v32, weights_behind_layers), configured=configured),
    replace(decoder_family("glm_moe_dsa", glm_moe_dsa, weights_behind_layers), configured=configured),
):
    register_model(family)
