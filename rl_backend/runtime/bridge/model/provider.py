"""Settings of Megatron-Bridge's model provider, from this runtime's options and the user's own values."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.transformer.enums import AttnBackend

from rl_backend.contracts import ConfigError, Head, RuntimeConfig, UnsupportedError
from rl_backend.runtime.bridge.checks import LayerSizes, require_layout
from rl_backend.runtime.bridge.config import BridgeConfig, megatron_sizes
from rl_backend.runtime.bridge.installed import has_transformer_engine
from rl_backend.runtime.bridge.megatron.deltanet import has_deltanet, require_deltanet_kernels
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.megatron.local_layers import LATENT_EPS, LOCAL_LAYERS, use_local_layers
from rl_backend.runtime.bridge.model.hf_config import read_provider

_NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"

_LOCAL_ATTENTION = ("masked_softmax_fusion", "attention_softmax_in_fp32")
"""What Megatron's own attention alone reads."""


def make_provider(
    bridge: AutoBridge, config: RuntimeConfig, groups: BridgeGroups, head: Head, *, transformer_engine: bool
) -> GPTModelProvider:
    """The provider with this runtime's settings, finished.

    Args:
        transformer_engine: whether layers are Transformer Engine's.

    Raises:
        ConfigError: an override that Megatron does not have or that cannot hold here, or a layout that Megatron refuses.
        UnsupportedError: what Megatron would ignore or cannot do on this device.
    """
    options = config.options(BridgeConfig)
    provider = read_provider(bridge, config.hf_path)
    sizes = LayerSizes(
        num_layers=provider.num_layers,
        num_attention_heads=provider.num_attention_heads,
        num_key_value_heads=provider.num_query_groups or provider.num_attention_heads,
        ffn_hidden_size=provider.ffn_hidden_size,
        num_experts=provider.num_moe_experts or 0,
        shared_expert_size=provider.moe_shared_expert_intermediate_size,
        linear_num_key_heads=provider.linear_num_key_heads if has_deltanet(provider) else None,
        model_type=bridge.hf_pretrained.config.model_type,
    )
    # Before anything is set: both compare with what the model has by itself.
    require_layout(options, sizes, transformer_engine=transformer_engine)
    check_overrides_of_model(options, provider, transformer_engine=transformer_engine)
    settings = _settings(options, provider, groups.device, head)
    if not transformer_engine:
        settings |= LOCAL_LAYERS
    # The user's values last: they win where a check has let them through.
    for name, value in {**settings, **options.override_transformer_config}.items():
        setattr(provider, name, attention_backend(value) if name == "attention_backend" else value)
    # After the settings: layers and kernels are chosen by the dtype and the parallelism that they give.
    require_deltanet_kernels(options, provider, groups.device)
    if not transformer_engine:
        use_local_layers(provider)
    elif provider.multi_latent_attention and provider.layernorm_epsilon != LATENT_EPS:
        raise UnsupportedError(
            f"config.json has rms_norm_eps={provider.layernorm_epsilon}: Transformer Engine's layers give it to the norms "
            f"of latents too, which the model has with {LATENT_EPS}; the native runtime may serve it",
            rms_norm_eps=provider.layernorm_epsilon,
        )
    elif provider.deterministic_mode:
        require_deterministic_kernels()
    # Last: it derives fields from all others.
    try:
        provider.finalize()
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron refuses the configuration of {config.hf_path}: {error}") from error
    return provider


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: on CUDA where it is installed; Megatron's own elsewhere."""
    return device.type == "cuda" and has_transformer_engine()


def packs_sequences(options: BridgeConfig, *, transformer_engine: bool) -> bool:
    """Whether attention takes packed sequences; Transformer Engine's kernels for them are of 16-bit types."""
    return transformer_engine and options.param_dtype != "float32"


def _settings(options: BridgeConfig, provider: Any, device: torch.device, head: Head) -> dict[str, Any]:
    parallel, dtype = options.parallel, getattr(torch, options.param_dtype)
    settings: dict[str, Any] = {
        **megatron_sizes(parallel),
        "sequence_parallel": parallel.tp > 1,
        "variable_seq_lengths": parallel.pp > 1,
        # With two stages each neighbour is the previous and the next one, and only separate sends tell these apart.
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
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
        "moe_token_dispatcher_type": "alltoall",
        **{name: getattr(options, name) for name in ("recompute_granularity", "recompute_method", "recompute_num_layers")},
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
        # Megatron-Bridge gives some families 1e-3; ExpertBalance moves biases in its place.
        settings["moe_router_bias_update_rate"] = 0.0
    return settings


def override[T](field: str, config_type: Callable[..., T], overrides: Mapping[str, Any], settings: Mapping[str, Any]) -> T:
    """One of Megatron's dataclasses from this runtime's settings and the user's.

    Raises:
        ConfigError: a field that the dataclass does not have, or values that it refuses.
    """
    names = {each.name for each in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    for name, value in overrides.items():
        if name not in names:
            raise ConfigError.of(f"{field}[{name!r}]", value, f"Megatron's {config_type.__name__} has no such field")
    try:
        return config_type(**{**settings, **overrides})
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"{field}={dict(overrides)!r}: Megatron refuses it: {error}") from error


def attention_backend(name: str) -> AttnBackend:
    """Megatron compares with members of its enumeration only; raises :class:`ConfigError` for a name that none has."""
    if name not in AttnBackend.__members__:
        field = "BridgeConfig.override_transformer_config['attention_backend']"
        raise ConfigError.of(field, name, f"expected one of {', '.join(map(repr, AttnBackend.__members__))}")
    return AttnBackend[name]


def check_overrides_of_model(options: BridgeConfig, provider: Any, *, transformer_engine: bool) -> None:
    """Refuses overrides, and a rate of biases, that this model or device would ignore.

    Args:
        provider: Megatron-Bridge's of the model, before anything is set.
        transformer_engine: whether layers are Transformer Engine's.

    Raises:
        ConfigError: names the override.
    """
    for name, value in options.override_transformer_config.items():
        field = f"BridgeConfig.override_transformer_config[{name!r}]"
        if not transformer_engine and (
            name == "attention_backend" or (name in LOCAL_LAYERS and value != LOCAL_LAYERS[name])
        ):
            raise ConfigError.of(field, value, "needs layers of Transformer Engine: CUDA and the package transformer-engine")
        if transformer_engine and name in _LOCAL_ATTENTION and value != getattr(provider, name):
            raise ConfigError.of(
                field, value, "Transformer Engine's attention, which this device has, would ignore it; leave it out"
            )
        if name.startswith("moe_") and provider.num_moe_experts is None:
            raise ConfigError.of(field, value, "this model has no experts, so Megatron would ignore it")
        padded = not packs_sequences(options, transformer_engine=transformer_engine)
        if name == "moe_expert_capacity_factor" and value is not None and padded:
            raise ConfigError.of(
                field,
                value,
                "sequences are padded here, and padding would take the places of tokens; leave it out, or use "
                "param_dtype='bfloat16' on CUDA with the package transformer-engine",
            )
    if options.expert_bias_rate and not provider.moe_router_enable_expert_bias:
        raise ConfigError.of(
            "BridgeConfig.expert_bias_rate", options.expert_bias_rate, "routers of this model have no bias; leave it out"
        )
    name = "apply_wd_to_qk_layernorm"
    value = options.override_optimizer_config.get(name)
    if value and not provider.qk_layernorm:
        raise ConfigError.of(
            f"BridgeConfig.override_optimizer_config[{name!r}]",
            value,
            "this model has no norms of queries and keys, so Megatron would ignore it; leave it out",
        )


def require_deterministic_kernels() -> None:
    """Sets what Transformer Engine reads where attention is built, and without which Megatron refuses to build it.

    Raises:
        ConfigError: the environment asks for the contrary.
    """
    given = os.environ.setdefault(_NONDETERMINISTIC, "0")
    if given != "0":
        raise ConfigError.of(
            "BridgeConfig.override_transformer_config['deterministic_mode']",
            True,
            f"the environment has {_NONDETERMINISTIC}={given}, with which Transformer Engine may choose kernels that are "
            "not deterministic; unset it, or set it to 0",
        )
