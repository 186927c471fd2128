"""DeepSeek-V3.2 and GLM-5: latent attention to keys that an indexer chooses, and mixtures as DeepSeek-V3 has them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rl_backend.contracts import ConfigError, ModelOptions
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.deepseek import LatentDefaults, latent_decoder
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.mixers.indexer import IndexerSpec
from rl_backend.model.mixers.mla import ChosenKeysSpec, MLASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.model.registry import ModelFamily, register_model
from rl_backend.model.sigmoid_mixtures import sigmoid_mixture_family

INDEXER = "indexer"
"""What a layer calls its indexer."""


def deepseek_v32(config: HFConfig) -> DecoderSpec:
    """DeepSeek-V3.2 (arXiv 2512.02556): an indexer in every layer, which rotates halves; attention rotates neighbours."""
    decoder = latent_decoder(config, LatentDefaults(groups=(8, 4), dense=3, scale=2.5, eps=1e-6, query_rank=1536))
    return _sparse(config, decoder, ["full"] * decoder.num_layers, default_heads=64, default_interleaved=False)


def glm_moe_dsa(config: HFConfig) -> DecoderSpec:
    """GLM-5, 5.1 and 5.2 (arXiv 2602.15763): layers that ``indexer_types`` calls shared follow the one before."""
    decoder = latent_decoder(config, LatentDefaults(groups=(1, 1), dense=3, scale=2.5, eps=1e-5, query_rank=2048))
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
    """With what the family's options say of indexers, and of the rest.

    Raises:
        ConfigError: what a warm-up, which trains indexers alone, would leave as it is or move all the same.
    """
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
    reason = "indexer='warm_up' trains indexers alone; leave it out, or warm up first"
    if options.expert_bias_rate:
        raise ConfigError.of("NativeConfig.model_cfg.expert_bias_rate", options.expert_bias_rate, reason)
    if options.mtp != "keep":
        raise ConfigError.of("NativeConfig.model_cfg.mtp", options.mtp, reason)


def _sparse_family(name: str, read: Callable[[HFConfig], DecoderSpec]) -> ModelFamily:
    return replace(sigmoid_mixture_family(name, read), configured=configured)


DEEPSEEK_V32 = _sparse_family("deepseek_v32", deepseek_v32)
GLM_MOE_DSA = _sparse_family("glm_moe_dsa", glm_moe_dsa)
for family in (DEEPSEEK_V32, GLM_MOE_DSA):
    register_model(family)
