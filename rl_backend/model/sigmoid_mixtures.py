"""Mixtures of experts whose routers score each expert by itself: DeepSeek-V3's, and those of GLM and Kimi that follow it.

Released directories have a layer for multi-token prediction behind the others. It is kept as it is, and grows stale as the
model learns, unless it is trained too (:mod:`rl_backend.model.multi_token`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_backend.model.blocks import FeedForwardSpec
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families import decoder_family
from rl_backend.model.feedforward.moe import ExpertNames, MoESpec
from rl_backend.model.feedforward.swiglu import SwiGLUSpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.multi_token import MTPNames, MTPSpec
from rl_backend.model.registry import ModelFamily
from rl_backend.primitive.router import RouterSettings

_HONOURED: Mapping[str, tuple[Any, ...]] = {
    # Fields of released directories; transformers knows neither, and takes these values.
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
_NAMES = ExpertNames(shared="shared_experts")


def read_sigmoid_mixture(
    config: HFConfig, *, default_groups: tuple[int, int] = (1, 1), default_scale: float = 1.0
) -> MoESpec:
    """``n_routed_experts`` experts, chosen within groups by scores and a bias, and ``n_shared_experts`` for all tokens.

    Args:
        default_groups: ``n_group`` and ``topk_group`` where there are none.
        default_scale: ``routed_scaling_factor`` where there is none.

    Raises:
        UnsupportedError: another way to score or to choose, or numbers that do not fit each other.
    """
    config.require(_HONOURED)
    width = config.positive_int("moe_intermediate_size")
    return MoESpec(
        read_sigmoid_router(config, default_groups, default_scale),
        width,
        _NAMES,
        shared_intermediate_size=config.positive_int("n_shared_experts", 1) * width,
    )


def read_sigmoid_router(config: HFConfig, default_groups: tuple[int, int], default_scale: float) -> RouterSettings:
    """The router of :func:`read_sigmoid_mixture`, with logits in float32."""
    experts, top_k = config.positive_int("n_routed_experts"), config.positive_int("num_experts_per_tok")
    groups, chosen = (
        config.positive_int(field, default) for field, default in zip(("n_group", "topk_group"), default_groups, strict=True)
    )
    if experts % groups:
        config.refuse("n_group", groups, f"does not divide n_routed_experts={experts}")
    size = experts // groups
    if groups > 1 and size < 2:
        config.refuse("n_group", groups, f"n_routed_experts={experts} leave 1 in a group, whose two best are added up")
    if chosen > groups:
        config.refuse("topk_group", chosen, f"there are n_group={groups}")
    if top_k > chosen * size:
        config.refuse("num_experts_per_tok", top_k, f"topk_group={chosen} groups have {chosen * size} experts")
    return RouterSettings(
        experts,
        top_k,
        score="sigmoid",
        normalise=config.flag("norm_topk_prob", True),
        scaling_factor=config.positive_float("routed_scaling_factor", default_scale),
        expert_bias=True,
        groups=groups,
        chosen_groups=chosen,
    )


def after_dense_layers(config: HFConfig, mixture: FeedForwardSpec, *, default_dense: int) -> Sequence[FeedForwardSpec]:
    """``mixture`` where ``mlp_layer_types`` says sparse, or from layer ``first_k_dense_replace`` on; else dense blocks.

    Args:
        default_dense: number of dense layers where neither field says.

    Raises:
        UnsupportedError: the fields contradict each other.
    """
    layers, kinds = config.positive_int("num_hidden_layers"), config.get("mlp_layer_types")
    dense = config.get("first_k_dense_replace")
    if dense is not None and (not isinstance(dense, int) or isinstance(dense, bool) or dense < 0):
        config.refuse("first_k_dense_replace", dense, "expected a number of layers")
    first = default_dense if dense is None else dense
    by_number = ["dense" if layer < first else "sparse" for layer in range(layers)]
    if kinds is None:
        kinds = by_number
    elif not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        config.refuse("mlp_layer_types", kinds, f"expected 'dense' or 'sparse' for each of num_hidden_layers={layers}")
    elif dense is not None and kinds != by_number:
        config.refuse("first_k_dense_replace", dense, f"mlp_layer_types says {kinds}; make them the same")
    block = SwiGLUSpec(config.positive_int("intermediate_size"))
    return [block if kind == "dense" else mixture for kind in kinds]


def with_draft_layer(config: HFConfig, decoder: DecoderSpec, mixture: FeedForwardSpec) -> DecoderSpec:
    """``decoder`` with the layer for multi-token prediction of which ``num_nextn_predict_layers`` says whether there is one.

    Its attention is that of the last layer. It has the mixture, even where all layers before it are dense.
    """
    config.require({"num_nextn_predict_layers": (0, 1)})
    if config.get("num_nextn_predict_layers", 0) != 1:
        return decoder
    names = MTPNames.after_layers(decoder.prefix, decoder.num_layers)
    return replace(decoder, mtp=MTPSpec(decoder.layers[-1]._replace(feed_forward=mixture), names))


def sigmoid_mixture_family(name: str, read: Callable[[HFConfig], DecoderSpec]) -> ModelFamily:
    """The family called ``name``; what its directories have behind the layers is kept, whether or not they say so."""

    def kept(decoder: DecoderSpec) -> tuple[str, ...]:
        """Layers for multi-token prediction are numbered behind the others."""
        return (f"{decoder.prefix}.layers.{decoder.num_layers}.",)

    return replace(decoder_family(name, read), kept_weights=kept)
