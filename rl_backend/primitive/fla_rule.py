"""The gated delta rule by the Triton kernels of flash-linear-attention, which CUDA alone has."""

import importlib.util

import torch
from torch import Tensor


def has_fla() -> bool:
    """Whether flash-linear-attention is installed. It is no dependency of this package."""
    return importlib.util.find_spec("fla") is not None


def fla_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """As :func:`~rl_backend.primitive.gated_delta.gated_delta_rule`, with float32 states between bfloat16 products.

    Args:
        value: of the dtype that products are computed in, which the kernels have in 16 bits only.
        cu_seqlens: (S + 1,), where each sequence starts, on the device.

    Returns:
        (T, heads, value_dim), of the dtype of ``value``.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    groups = value.shape[1] // key.shape[1]
    query, key = (x.to(value.dtype).repeat_interleave(groups, dim=1) for x in (query, key))
    rows = (x[None].contiguous() for x in (query, key, value, decay, beta))
    # The queries are scaled already.
    out, _ = chunk_gated_delta_rule(*rows, scale=1.0, cu_seqlens=cu_seqlens.to(torch.int64))
    outputs: Tensor = out[0]
    return outputs
