"""Text models that a directory nests in a model with a vision tower, and the names of their weights."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from megatron.bridge.models.qwen.qwen35_bridge import Qwen35Bridge, Qwen35MoEBridge

from rl_backend.contracts import UnsupportedError, text_config

_PREFIX = "model.language_model."
"""Of a released model's text weights; a directory with the text model alone has ``model.``."""

_GROUPED = re.compile(r"experts\.(linear_fc[12])\.weight\*")
"""Megatron's name of the weights of all experts in one module."""

_NESTED: Mapping[str, Callable[[], list[Any]]] = {
    "qwen3_5": lambda: Qwen35Bridge._get_dense_lm_mappings(hf_prefix=_PREFIX),
    "qwen3_5_moe": lambda: Qwen35MoEBridge._get_moe_lm_mappings(hf_prefix=_PREFIX),
}
"""``model_type`` of models with a text model inside -> Megatron-Bridge's mappings of its weights."""


def text_model_config(hf_config: Any, fields: Mapping[str, Any]) -> Any:
    """transformers' configuration of the text model inside; of another model its own.

    Args:
        fields: of ``config.json``.

    Raises:
        UnsupportedError: it says twice, in two ways, whether the embedding is also the head.
    """
    if hf_config.model_type not in _NESTED:
        return hf_config
    inside, name = hf_config.text_config, "tie_word_embeddings"
    tied = {part[name] for part in (fields, text_config(fields)) if part.get(name) is not None}
    if len(tied) > 1:
        raise UnsupportedError(f"config.json and its text_config differ in {name}; make them the same", field=name)
    inside.tie_word_embeddings = any(tied)
    return inside


def set_mappings(model_bridge: Any, model_type: str, *, local_layers: bool) -> None:
    """Gives Megatron-Bridge the names that the weights of a model have in its directory and in Megatron's layers.

    Args:
        model_bridge: Megatron-Bridge's part for the text model.
        model_type: in the directory's ``config.json``.
        local_layers: whether layers are Megatron's own: gated norms of DeltaNet keep Hugging Face's weights as they are, and
            each expert is a module.
    """
    own = model_bridge.mapping_registry

    def mapping_registry() -> MegatronMappingRegistry:
        nested = _NESTED.get(model_type)
        mappings = list(own().mappings) if nested is None else nested()
        if local_layers:
            mappings = _with_single_experts([_as_it_is(each) for each in mappings])
        return MegatronMappingRegistry(*mappings)

    model_bridge.mapping_registry = mapping_registry


def _as_it_is(mapping: Any) -> Any:
    if isinstance(mapping, RMSNorm2ZeroCenteredRMSNormMapping):
        return AutoMapping(mapping.megatron_param, mapping.hf_param)
    return mapping


def _with_single_experts(mappings: list[Any]) -> list[Any]:
    """Some families (GLM-4.5, MiniMax-M2) have names for grouped experts only."""
    known, added = {each.megatron_param for each in mappings}, []
    for each in mappings:
        name = _GROUPED.sub(r"experts.local_experts.*.\1.weight", each.megatron_param)
        if name not in known:
            known.add(name)
            names = each.hf_param
            same = AutoMapping(name, names) if isinstance(names, str) else GatedMLPMapping(name, names["gate"], names["up"])
            added.append(same)
    return [*mappings, *added]
