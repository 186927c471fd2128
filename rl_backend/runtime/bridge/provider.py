"""Megatron-Bridge's model provider: what it is told, and what of config.json it does not pass on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import ConfigError, Head, RuntimeConfig, UnsupportedError
from rl_backend.runtime.bridge.groups import BridgeGroups
from rl_backend.runtime.bridge.installed import has_transformer_engine
from rl_backend.runtime.bridge.megatron_cpu import SequenceParallelRMSNorm
from rl_backend.runtime.bridge.overrides import (
    LOCAL_LAYERS,
    attention_backend,
    check_overrides_of_model,
    require_deterministic_kernels,
)
from rl_backend.runtime.bridge_config import BridgeConfig

_YARN_DEFAULTS: Mapping[str, Any] = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
"""What transformers computes with where ``config.json`` does not say; Megatron-Bridge passes on None."""


def require_same_model(hf_config: Any, provider: Any) -> None:
    """Sets what Megatron-Bridge leaves out and Megatron has; :class:`UnsupportedError` for what Megatron would ignore.

    Args:
        hf_config: transformers' configuration.
        provider: what Megatron-Bridge made of it.
    """
    rope: dict[str, Any] = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        provider.seq_len_interpolation_factor = float(rope["factor"])
    if kind == "yarn":
        for name, default in _YARN_DEFAULTS.items():
            if getattr(provider, name) is None:
                setattr(provider, name, default)
    known = {
        "default": True,
        "linear": True,
        "yarn": provider.position_embedding_type == "yarn" and rope.get("attention_factor") is None,
        "llama3": provider.rope_scaling
        and (rope.get("low_freq_factor"), rope.get("high_freq_factor"), rope.get("original_max_position_embeddings"))
        == (1.0, 4.0, 8192),
    }
    if not known.get(kind, False):
        raise UnsupportedError(
            f"config.json has rope parameters {rope!r}, which Megatron would compute otherwise or ignore; the native "
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
    if getattr(provider, "use_mup", False):
        raise UnsupportedError("the model scales its logits (MuP); the bridge runtime does not")


def _require_experts_everywhere(hf_config: Any, provider: Any) -> None:
    """Refuses layers without experts between those with, of which Megatron-Bridge makes mixtures as well."""
    step, listed = getattr(hf_config, "decoder_sparse_step", None) or 1, getattr(hf_config, "mlp_only_layers", None) or []
    dense = [layer for layer in range(provider.num_layers) if layer in listed or (layer + 1) % step]
    if provider.num_moe_experts is not None and dense and provider.moe_layer_freq == 1:
        raise UnsupportedError(
            f"config.json: decoder_sparse_step={step}, mlp_only_layers={list(listed)}: layers {dense} have no experts, and "
            "Megatron-Bridge gives experts to every layer; the native runtime may serve it",
            layers=dense,
        )


def open_bridge(hf_path: str) -> AutoBridge:
    """The Megatron-Bridge of a directory, by its ``model_type``.

    Raises:
        UnsupportedError: transformers or Megatron-Bridge does not know the model.
        CheckpointError: weight files that are missing or damaged.
    """
    model_type = HFReader(hf_path).config.get("model_type")
    try:
        config = AutoConfig.from_pretrained(hf_path)
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


def make_provider(bridge: AutoBridge, config: RuntimeConfig, groups: BridgeGroups, head: Head) -> GPTModelProvider:
    """The provider with this runtime's settings, finished.

    Raises:
        ConfigError: an override that Megatron does not have or that cannot hold here, or a layout that Megatron refuses.
        UnsupportedError: what Megatron would ignore or cannot do on this device.
    """
    options = config.options(BridgeConfig)
    try:
        provider = bridge.to_megatron_provider(load_weights=False)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnsupportedError(
            f"Megatron-Bridge cannot read the configuration of {config.hf_path}: {error}; the native runtime may serve it"
        ) from error
    if not isinstance(provider, GPTModelProvider):
        raise UnsupportedError(
            f"Megatron-Bridge builds {config.hf_path} with {type(provider).__name__}; this runtime trains GPTModelProvider "
            "models only"
        )
    require_same_model(bridge.hf_pretrained.config, provider)
    _require_layout(options, provider, groups)
    settings = _settings(options, provider, groups.device, head)
    check_overrides_of_model(options, provider, transformer_engine=uses_transformer_engine(groups.device))
    for name, value in {**settings, **options.override_transformer_config}.items():
        setattr(provider, name, attention_backend(value) if name == "attention_backend" else value)
    if not uses_transformer_engine(groups.device):
        _use_local_layers(provider)
    elif provider.deterministic_mode:
        require_deterministic_kernels()
    try:
        provider.finalize()
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron refuses the configuration of {config.hf_path}: {error}") from error
    return provider


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: on CUDA where it is installed; Megatron's own elsewhere."""
    return device.type == "cuda" and has_transformer_engine()


def takes_packed_sequences(options: BridgeConfig, device: torch.device) -> bool:
    """Whether attention does: Transformer Engine's kernels for packed sequences are of 16-bit types."""
    return uses_transformer_engine(device) and options.param_dtype != "float32"


def _settings(options: BridgeConfig, provider: Any, device: torch.device, head: Head) -> dict[str, Any]:
    parallel, dtype = options.parallel, getattr(torch, options.param_dtype)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.tp > 1,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "should_pad_vocab": provider.vocab_size % parallel.tp != 0,
        "make_vocab_size_divisible_by": 1,
        "mtp_num_layers": None,
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
        # The runtime loads all weights.
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
    }
    if options.recompute_modules is not None:
        settings["recompute_modules"] = list(options.recompute_modules)
    if head == "values":
        settings["share_embeddings_and_output_weights"] = False
    if provider.num_moe_experts is not None:
        # A policy gradient is not the place for a balancing loss that nobody asked for.
        settings |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp32"}
        # Megatron would move the bias in forward_backward, before the step is known to be taken.
        settings["moe_router_bias_update_rate"] = 0.0
    if not uses_transformer_engine(device):
        settings |= LOCAL_LAYERS
    settings["moe_token_dispatcher_type"] = "alltoall"
    settings["variable_seq_lengths"] = parallel.pp > 1
    # With two stages each neighbour is the previous and the next one, and only separate sends tell these apart.
    settings["overlap_p2p_comm"] = parallel.vpp > 1
    settings["batch_p2p_comm"] = parallel.vpp == 1
    return settings


def _require_layout(options: BridgeConfig, provider: Any, groups: BridgeGroups) -> None:
    parallel = options.parallel
    if parallel.cp > 1:
        reason = (
            "the bridge runtime does not split packed sequences over context-parallel ranks"
            if uses_transformer_engine(groups.device)
            else "Megatron's own attention has no context parallelism (it asserts cp=1), only Transformer Engine's has"
        )
        raise ConfigError.of("BridgeConfig.parallel.cp", parallel.cp, f"{reason}; use 1")
    if provider.num_moe_experts is None:
        for name in ("ep", "etp"):
            if getattr(parallel, name) != 1:
                raise ConfigError.of(f"BridgeConfig.parallel.{name}", getattr(parallel, name), "this model has no experts")
    elif provider.num_moe_experts % parallel.ep:
        raise ConfigError.of(
            "BridgeConfig.parallel.ep", parallel.ep, f"does not divide the model's {provider.num_moe_experts} experts"
        )
    stages = parallel.pp * parallel.vpp
    uneven = {"num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"}
    if provider.num_layers % stages and not uneven & options.override_transformer_config.keys():
        raise ConfigError(
            f"BridgeConfig.parallel: {provider.num_layers} layers do not divide into pp*vpp = {parallel.pp}*{parallel.vpp} "
            f"= {stages} stages; use a divisor, or set {', '.join(sorted(uneven))} in override_transformer_config"
        )
    for name, count in (
        ("num_attention_heads", provider.num_attention_heads),
        ("ffn_hidden_size", provider.ffn_hidden_size),
    ):
        if count % parallel.tp:
            raise ConfigError.of("BridgeConfig.parallel.tp", parallel.tp, f"does not divide {name}={count}")
    query_groups = provider.num_query_groups or provider.num_attention_heads
    if query_groups % parallel.tp and not (uses_transformer_engine(groups.device) and parallel.tp % query_groups == 0):
        raise ConfigError.of("BridgeConfig.parallel.tp", parallel.tp, f"does not divide num_key_value_heads={query_groups}")


def _use_local_layers(provider: Any) -> None:
    """Megatron's own layers in place of Transformer Engine's, with a norm that allows sequence parallelism."""
    if provider.transformer_layer_spec is not default_layer_spec:
        raise UnsupportedError(
            f"Megatron-Bridge builds {type(provider).__name__} with layers of its own, which need Transformer Engine: CUDA "
            "and the package transformer-engine"
        )

    def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
        )
        return _replace(spec, WrappedTorchNorm, SequenceParallelRMSNorm)

    if provider.normalization != "RMSNorm":
        raise UnsupportedError(f"normalization {provider.normalization!r} needs Transformer Engine here; RMSNorm does not")
    provider.transformer_layer_spec = layer_spec


def _replace(spec: Any, old: object, new: object) -> Any:
    """``spec`` with ``new`` for every ``old``, however deep."""
    if spec is old:
        return new
    if isinstance(spec, list):
        return [_replace(each, old, new) for each in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        values = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **{name: _replace(value, old, new) for name, value in values.items()})
    return spec
