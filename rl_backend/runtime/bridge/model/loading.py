"""Hugging Face directories in Megatron-Bridge: what Megatron makes of ``config.json``, and loading the weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource
from megatron.core.utils import unwrap_model
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.checkpoint.hf_weights import require_same_head
from rl_backend.contracts import VALUE_HEAD_WEIGHTS, CheckpointError, Head, UnsupportedError
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.model.conversion import hf_names, unconverted
from rl_backend.runtime.bridge.model.families import complete_provider, require_same_latents, require_same_routing
from rl_backend.runtime.bridge.model.text_models import text_model_config
from rl_backend.runtime.bridge.passes.batch import CriticOutputLayer

_YARN_DEFAULTS: Mapping[str, Any] = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
"""What transformers computes with where ``config.json`` does not say; Megatron-Bridge passes on None."""


def open_bridge(hf_path: str) -> AutoBridge:
    """The Megatron-Bridge of a directory, by its ``model_type``.

    Raises:
        UnsupportedError: transformers or Megatron-Bridge does not know the model.
        CheckpointError: weight files that are missing or damaged.
    """
    reader = HFReader(hf_path)
    model_type = reader.config.get("model_type")
    try:
        config = text_model_config(AutoConfig.from_pretrained(hf_path), reader.config)
    except ValueError as error:
        raise UnsupportedError(
            f"{hf_path}: transformers has no configuration for model_type {model_type!r}, which Megatron-Bridge starts from",
            model_type=model_type,
        ) from error
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
        raise UnsupportedError(
            f"{hf_path}: Megatron-Bridge has no bridge for model_type {config.model_type!r} ({config.architectures}); the "
            "native runtime may serve it",
            model_type=config.model_type,
        )
    return bridge


class _NativeNames(StateSource):
    """The weights of a directory as the native runtime reads them: from its files, under its names of single experts and of
    the text model.
    """

    def __init__(self, reader: HFReader) -> None:
        self._reader = reader

    def get_all_keys(self) -> list[str]:
        return list(self._reader.infos)

    def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        return {name: self._reader.read(name) for name in keys}


def read_provider(bridge: AutoBridge, hf_path: str) -> GPTModelProvider:
    """What Megatron-Bridge makes of ``config.json``, where Megatron computes the same model from it.

    Raises:
        UnsupportedError: it cannot be read, or says what Megatron would ignore.
    """
    indexed = getattr(bridge.hf_pretrained.config, "index_topk", None)
    if indexed is not None:
        # Megatron-Bridge would also train the indexers, with a loss that nobody asked for.
        raise UnsupportedError(
            f"config.json has index_topk={indexed}, sparse attention, which the bridge runtime does not have; the native "
            "runtime may serve it",
            index_topk=indexed,
        )
    try:
        provider = bridge.to_megatron_provider(load_weights=False)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnsupportedError(
            f"Megatron-Bridge cannot read the configuration of {hf_path}: {error}; the native runtime may serve it"
        ) from error
    if not isinstance(provider, GPTModelProvider):
        raise UnsupportedError(
            f"Megatron-Bridge builds {hf_path} with {type(provider).__name__}; this runtime trains GPTModelProvider "
            "models only"
        )
    _require_same_model(bridge.hf_pretrained.config, provider)
    return provider


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
        pretrained, model_bridge: the directory, and Megatron-Bridge's part for the model family.
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
    wanted_by_ranks: list[set[str]] = [set()] * groups.world_size
    dist.all_gather_object(wanted_by_ranks, wanted, group=groups.host_group)
    left = stored.difference(*wanted_by_ranks)
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


def _require_same_model(hf_config: Any, provider: Any) -> None:
    """Sets what Megatron-Bridge leaves out and Megatron has; :class:`UnsupportedError` for what Megatron would ignore.

    Args:
        hf_config: transformers' configuration.
        provider: what Megatron-Bridge made of it.
    """
    complete_provider(hf_config, provider)
    rope: dict[str, Any] = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor") is not None:
        provider.rotary_percent = float(rope["partial_rotary_factor"])
    if kind == "linear":
        provider.seq_len_interpolation_factor = float(rope["factor"])
    if kind == "yarn":
        for name, default in _YARN_DEFAULTS.items():
            if getattr(provider, name) is None:
                setattr(provider, name, default)
    latent = bool(provider.multi_latent_attention)
    known = {
        "default": True,
        "linear": not latent,
        # Of heads that rotate in part Megatron's YaRN gives other angles.
        "yarn": (_is_yarn_of_latents(rope) if latent else provider.position_embedding_type == "yarn")
        and (latent or provider.rotary_percent == 1.0)
        and rope.get("attention_factor") is None,
        "llama3": not latent
        and provider.rope_scaling
        and (rope.get("low_freq_factor"), rope.get("high_freq_factor"), rope.get("original_max_position_embeddings"))
        == (1.0, 4.0, 8192),
    }
    if not known.get(kind, False):
        raise UnsupportedError(
            f"config.json has rope parameters {rope!r}, which Megatron would compute differently or ignore; the native "
            "runtime may serve it",
            rope_type=kind,
        )
    window = getattr(hf_config, "sliding_window", None)
    layers = getattr(hf_config, "layer_types", None) or ()
    slides = window is not None and (any("sliding" in layer for layer in layers) if layers else True)
    if slides and provider.window_size is None:
        raise UnsupportedError(
            f"config.json has sliding_window={window}, which Megatron-Bridge does not pass on; the native runtime may "
            "serve it",
            sliding_window=window,
        )
    _require_experts_everywhere(hf_config, provider)
    require_same_latents(hf_config, provider)
    require_same_routing(hf_config, provider)
    if getattr(hf_config, "norm_topk_prob", None) is False and not provider.moe_router_pre_softmax:
        raise UnsupportedError(
            "config.json has norm_topk_prob=False, which Megatron-Bridge does not pass on: the weights of a token's experts "
            "would add up to 1; the native runtime may serve it",
            norm_topk_prob=False,
        )
    if getattr(provider, "use_mup", False):
        raise UnsupportedError("the model scales its logits (MuP); the bridge runtime does not")


def _is_yarn_of_latents(rope: Mapping[str, Any]) -> bool:
    """Whether Megatron's latent attention has all of a YaRN embedding; of two scales transformers takes both or none."""
    return bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim")) and rope.get("truncate") is not False


def _require_experts_everywhere(hf_config: Any, provider: Any) -> None:
    """Refuses layers without experts between layers with experts: Megatron-Bridge gives experts to both."""
    step, listed = getattr(hf_config, "decoder_sparse_step", None) or 1, getattr(hf_config, "mlp_only_layers", None) or []
    dense = [layer for layer in range(provider.num_layers) if layer in listed or (layer + 1) % step]
    if provider.num_moe_experts is not None and dense and provider.moe_layer_freq == 1:
        raise UnsupportedError(
            f"config.json: decoder_sparse_step={step}, mlp_only_layers={list(listed)}: layers {dense} have no experts, and "
            "Megatron-Bridge gives experts to every layer; the native runtime may serve it",
            layers=dense,
        )
