"""Gated DeltaNet in Megatron: what a device needs for it, and its parameter that stays in float32."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor, nn

from rl_backend.contracts import ConfigError
from rl_backend.primitive.causal_conv import causal_conv
from rl_backend.primitive.float32 import widened
from rl_backend.primitive.gated_delta import gated_delta_rule, l2_normalised
from rl_backend.runtime.bridge.config import BridgeConfig

# What a state is multiplied by at each token: it carries their rounding on. The native runtime and vLLM have the same.
FLOAT32_PARAMETERS = ("A_log",)


def has_deltanet(provider: Any) -> bool:
    """Whether a model provider of Megatron-Bridge builds layers of gated DeltaNet."""
    return bool(provider.experimental_attention_variant == "gated_delta_net")


def require_deltanet_kernels(options: BridgeConfig, provider: Any, device: torch.device) -> None:
    """Raises :class:`ConfigError` for options that flash-linear-attention, which a CUDA device needs, does not allow."""
    if not has_deltanet(provider) or device.type == "cpu":
        return
    problems: list[tuple[str, Any, str]] = []
    if options.param_dtype == "float32":
        problem = (
            "flash-linear-attention, with whose kernels Megatron computes gated DeltaNet, takes 16-bit types only; use "
            "'bfloat16' (the decay and the state stay in float32)"
        )
        problems.append(("BridgeConfig.param_dtype", options.param_dtype, problem))
    if provider.deterministic_mode:
        problem = "Megatron's gated DeltaNet then takes no packed sequences; leave it out"
        problems.append(("BridgeConfig.override_transformer_config['deterministic_mode']", True, problem))
    ConfigError.refuse_all(problems)


def keep_decay_in_float32(models: Sequence[nn.Module]) -> None:
    """Makes ``A_log`` float32, and keeps it so when Megatron rounds a model to ``param_dtype``."""
    # Before weights are loaded, which take on the dtype of each parameter.
    for model in models:
        for module in model.modules():
            if isinstance(module, GatedDeltaNet):
                for name in FLOAT32_PARAMETERS:
                    parameter = module.get_parameter(name)
                    parameter.data = parameter.data.float()
                # Megatron-Bridge looks for it where it wraps models of 16-bit types.
                vars(module)["_keep_in_float32_parameter_names"] = FLOAT32_PARAMETERS


# Functions of flash-linear-attention, which runs on CUDA only, in plain torch: cpu.PATCHES puts them in the kernels' places,
# on a CPU alone. Megatron's own torch form takes no packed sequences; this one is the native runtime's.
def l2norm(x: Tensor) -> Tensor:
    """(..., features), each over the root of its sum of squares plus 1e-6, in the dtype of ``x``."""
    return l2_normalised(x).to(x.dtype)


def causal_conv1d(
    *, x: Tensor, weight: Tensor, activation: str, cu_seqlens: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Depthwise convolution and SiLU that see nothing before the first token of a sequence: (rows, tokens, channels).

    Args:
        weight: (channels, width).
        cu_seqlens: where sequences begin and end in the single row of ``x``; None where each row is one.
    """
    assert activation in ("silu", "swish"), "as Megatron calls it"
    assert not any(others.values()), "as Megatron calls it"
    convolved = causal_conv(x.flatten(0, 1), weight[:, None], _lengths(x, cu_seqlens))
    return F.silu(convolved).view_as(x), None


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """The gated delta rule, from an empty state at the start of every sequence, in float32 or better.

    Args:
        query, key: (rows, tokens, heads, key_dim), normalised.
        value: (rows, tokens, heads, value_dim).
        g, beta: (rows, tokens, heads), logarithms of the decay, and how much of a value is written.
    """
    assert not any(others.values()), "as Megatron calls it"
    scaled = widened(query) * query.shape[-1] ** -0.5
    queries, keys, values, decay, strength = (x.flatten(0, 1) for x in (scaled, key, value, g, beta))
    outputs = gated_delta_rule(queries, keys, values, decay, strength, _lengths(query, cu_seqlens))
    return outputs.view_as(value).to(query.dtype), None


def _lengths(x: Tensor, cu_seqlens: Tensor | None) -> Sequence[int]:
    """Of the sequences in the flattened rows of ``x``."""
    if cu_seqlens is None:
        return [x.shape[1]] * x.shape[0]
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths
