"""Gated DeltaNet in Megatron: what a device needs for it, and its parameter that stays in float32."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import nn

from rl_backend.contracts import ConfigError, UnsupportedError
from rl_backend.primitive.gated_delta import has_fla
from rl_backend.runtime.bridge.config import BridgeConfig

FLOAT32_PARAMETERS = ("A_log",)
"""What a state is multiplied by at each token: it carries their rounding on. The native runtime and vLLM have the same."""


def has_deltanet(provider: Any) -> bool:
    """Whether a model provider of Megatron-Bridge builds layers of gated DeltaNet."""
    return bool(provider.experimental_attention_variant == "gated_delta_net")


def require_deltanet_kernels(options: BridgeConfig, provider: Any, device: torch.device) -> None:
    """Refuses what the kernels of a CUDA device cannot do; on a CPU plain torch takes their place.

    Args:
        provider: with the user's overrides.

    Raises:
        UnsupportedError: flash-linear-attention, whose kernels Megatron calls, is not installed.
        ConfigError: an option that those kernels do not allow.
    """
    if not has_deltanet(provider) or device.type == "cpu":
        return
    if not has_fla():
        raise UnsupportedError(
            "Megatron computes gated DeltaNet on CUDA with flash-linear-attention, which is not installed: pip install "
            "flash-linear-attention, or use backend='native'",
            package="flash-linear-attention",
        )
    if options.param_dtype == "float32":
        raise ConfigError.of(
            "BridgeConfig.param_dtype",
            options.param_dtype,
            "flash-linear-attention, with whose kernels Megatron computes gated DeltaNet, takes 16-bit types only; use "
            "'bfloat16' (the decay and the state stay in float32)",
        )
    if provider.deterministic_mode:
        raise ConfigError.of(
            "BridgeConfig.override_transformer_config['deterministic_mode']",
            True,
            "Megatron's gated DeltaNet then takes no packed sequences; leave it out",
        )


def keep_decay_in_float32(models: Sequence[nn.Module]) -> None:
    """Makes ``A_log`` float32, and keeps it so when Megatron rounds a model to ``param_dtype``.

    To be called before weights are loaded, which take on the dtype of each parameter.
    """
    for model in models:
        for module in model.modules():
            if isinstance(module, GatedDeltaNet):
                for name in FLOAT32_PARAMETERS:
                    parameter = module.get_parameter(name)
                    parameter.data = parameter.data.float()
                # Megatron-Bridge looks for it where it wraps models of 16-bit types.
                vars(module)["_keep_in_float32_parameter_names"] = FLOAT32_PARAMETERS
