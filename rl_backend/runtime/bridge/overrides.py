"""A user's values for fields of Megatron's dataclasses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.transformer.enums import AttnBackend

from rl_backend.contracts import ConfigError
from rl_backend.runtime.bridge_config import BridgeConfig

_NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"

LOCAL_LAYERS: Mapping[str, Any] = {
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "moe_router_fusion": False,
    "fp8": None,
    "fp4": None,
    "tp_comm_overlap": False,
    "cuda_graph_impl": "none",
}
"""What Megatron's own layers do without: kernels of Transformer Engine, Apex or CUDA."""

_LOCAL_ATTENTION = ("masked_softmax_fusion", "attention_softmax_in_fp32")
"""What Megatron's own attention alone reads."""


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
    """Refuses overrides that this model or device would ignore.

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
            "not; unset it, or set it to 0",
        )
