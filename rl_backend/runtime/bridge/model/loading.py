"""Loading a Hugging Face directory into Megatron's model, and the names that its weights have in both."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource
from megatron.bridge.models.qwen.qwen35_bridge import Qwen35Bridge, Qwen35MoEBridge
from megatron.core.utils import unwrap_model
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.checkpoint.hf_weights import require_same_head
from rl_backend.contracts import VALUE_HEAD_WEIGHTS, CheckpointError, Head, UnsupportedError, text_config
from rl_backend.parallel.collectives import gather_objects
from rl_backend.runtime.bridge.checks import no_bridge, require_bridge
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.model.conversion import hf_names, unconverted
from rl_backend.runtime.bridge.model.output_heads import CriticOutputLayer


def open_bridge(hf_path: str) -> AutoBridge:
    """The Megatron-Bridge of a directory, by its ``model_type``; raises :class:`UnsupportedError` if there is none."""
    reader = HFReader(hf_path)
    require_bridge(hf_path, reader.config)
    config = text_model_config(AutoConfig.from_pretrained(hf_path), reader.config)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is not None:
        # A critic's directory names ...ForTokenClassification, which Megatron-Bridge does not know.
        config.architectures = [name]
    pretrained = PreTrainedCausalLM.from_pretrained(hf_path)
    pretrained.config = config
    pretrained._state_dict_accessor = StateDict(_NativeNames(reader))
    bridge = AutoBridge(pretrained)
    try:
        found = AutoBridge.supports(config) and bridge._model_bridge is not None
    except NotImplementedError:
        found = False
    if not found:
        raise no_bridge(hf_path, config.model_type, config.architectures or ())
    return bridge


class _NativeNames(StateSource):
    """The weights of a directory, under the native runtime's names of single experts and of the text model."""

    def __init__(self, reader: HFReader) -> None:
        self._reader = reader

    def get_all_keys(self) -> list[str]:
        return list(self._reader.infos)

    def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        return {name: self._reader.read(name) for name in keys}


def load_model(
    chunks: Sequence[Any],
    pretrained: PreTrainedCausalLM,
    model_bridge: Any,
    groups: BridgeGroups,
    *,
    hf_path: str,
    head: Head,
    kept: tuple[str, ...],
) -> None:
    """Loads every parameter of new chunks, once it is certain that each has its weights and every weight its parameter.

    A collective: Megatron spreads weights from one rank of each group.

    Args:
        kept: beginnings of names of weights that Megatron's model need not have, as a saved one takes them from ``hf_path``.

    Raises:
        CheckpointError: weights that the directory lacks, or another head than the embeddings that it should be tied to.
        UnsupportedError: weights that Megatron's model has no place for.
    """
    last = [chunk for chunk in chunks if head == "values" and getattr(chunk, "post_process", False)]
    for chunk in last:
        # Megatron-Bridge cannot load parameters that it has no name for: a critic's head comes after the rest.
        chunk.output_layer = None
    stored = set(pretrained.state.source.get_all_keys())
    tasks = [task for task in model_bridge.build_conversion_tasks(pretrained, chunks) if task is not None]
    wanted = {name for task in tasks for name in hf_names(task)}
    missing = sorted(wanted - stored)
    if missing:
        raise CheckpointError(
            f"{hf_path} lacks {len(missing)} weights that Megatron's model needs: {', '.join(missing[:4])}", names=missing
        )
    unloaded = sorted(unconverted(unwrap_model(list(chunks)), tasks))
    if unloaded:
        raise UnsupportedError(
            f"Megatron-Bridge has no weights for the parameters {', '.join(unloaded[:4])}", names=unloaded
        )
    # Each rank knows its own experts only.
    left = stored.difference(*gather_objects(wanted, groups.host_group))
    unread = sorted(name for name in left if not name.startswith(kept) and not _may_be_unread(name, head, pretrained.config))
    if unread:
        raise UnsupportedError(
            f"{hf_path} has {len(unread)} weights that Megatron's model has no place for, so it would compute something "
            f"else: {', '.join(unread[:4])}",
            names=unread,
        )
    if head == "log_probs":
        require_same_head(hf_path)
    try:
        model_bridge.load_weights_hf_to_megatron(pretrained, chunks)
    except ValueError as error:
        raise CheckpointError(f"{hf_path} has weights of other shapes than its config.json says: {error}") from error
    for chunk in last:
        chunk.output_layer = CriticOutputLayer(chunk.config.hidden_size, chunk.config)
        head_of_values, reader = chunk.output_layer.value_head, HFReader(hf_path)
        with torch.no_grad():
            for name, parameter in zip(VALUE_HEAD_WEIGHTS, (head_of_values.weight, head_of_values.bias), strict=True):
                # What the directory lacks of them is 0.
                parameter.copy_(reader.read(name)) if name in reader.infos else parameter.zero_()


def _may_be_unread(name: str, head: Head, hf_config: Any) -> bool:
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return head == "values" or bool(getattr(hf_config, "tie_word_embeddings", False))
    return head == "values" and name in VALUE_HEAD_WEIGHTS


_PREFIX = "model.language_model."  # of a released model's text weights; a directory with the text model alone has "model."
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.weight\*")  # Megatron's name of the weights of all experts in one module
_NESTED: Mapping[str, Callable[[], list[Any]]] = {
    "qwen3_5": lambda: Qwen35Bridge._get_dense_lm_mappings(hf_prefix=_PREFIX),
    "qwen3_5_moe": lambda: Qwen35MoEBridge._get_moe_lm_mappings(hf_prefix=_PREFIX),
}
"""``model_type`` of models with a text model inside -> Megatron-Bridge's mappings of its weights."""


def text_model_config(hf_config: Any, fields: Mapping[str, Any]) -> Any:
    """transformers' configuration of the text model inside, if there is one; ``fields`` are those of ``config.json``."""
    if hf_config.model_type not in _NESTED:
        return hf_config
    inside, name = hf_config.text_config, "tie_word_embeddings"
    tied = {part[name] for part in (fields, text_config(fields)) if part.get(name) is not None}
    if len(tied) > 1:
        raise UnsupportedError(f"config.json and its text_config differ in {name}; make them the same", field=name)
    inside.tie_word_embeddings = any(tied)
    return inside


def set_mappings(model_bridge: Any, model_type: str, *, local_layers: bool) -> None:
    """Gives Megatron-Bridge the names of the weights of a ``model_type`` in its directory and in Megatron's layers."""
    own = model_bridge.mapping_registry

    def mapping_registry() -> MegatronMappingRegistry:
        nested = _NESTED.get(model_type)
        mappings = list(own().mappings) if nested is None else nested()
        if local_layers:
            mappings = _with_single_experts([_as_it_is(each) for each in mappings])
        return MegatronMappingRegistry(*mappings)

    model_bridge.mapping_registry = mapping_registry


def _as_it_is(mapping: Any) -> Any:
    # Gated norms of DeltaNet in local layers keep Hugging Face's weights as they are.
    if isinstance(mapping, RMSNorm2ZeroCenteredRMSNormMapping):
        return AutoMapping(mapping.megatron_param, mapping.hf_param)
    return mapping


def _with_single_experts(mappings: list[Any]) -> list[Any]:
    # Some families (GLM-4.5, MiniMax-M2) have names for grouped experts only; of local layers each expert is a module.
    known, added = {each.megatron_param for each in mappings}, []
    for each in mappings:
        name = _GROUPED.sub(r"experts.local_experts.*.\1.weight", each.megatron_param)
        if name not in known:
            known.add(name)
            names = each.hf_param
            same = AutoMapping(name, names) if isinstance(names, str) else GatedMLPMapping(name, names["gate"], names["up"])
            added.append(same)
    return [*mappings, *added]
