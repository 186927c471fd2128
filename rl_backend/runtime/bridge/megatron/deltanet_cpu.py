"""Functions of flash-linear-attention that Megatron's gated DeltaNet calls, in plain torch: that package runs on CUDA only.

:data:`rl_backend.runtime.bridge.megatron.cpu.PATCHES` puts these functions in the kernels' places, on a CPU alone. They take
the keyword arguments with which Megatron calls those. Megatron has a torch form too, which takes no packed sequences; this
one is the native runtime's.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.primitive.causal_conv import causal_conv
from rl_backend.primitive.gated_delta import gated_delta_rule, l2_normalised


def l2norm(x: Tensor) -> Tensor:
    """(..., features), each over the root of its sum of squares plus 1e-6, in the dtype of ``x``."""
    return l2_normalised(x).to(x.dtype)


def causal_conv1d(
    *,
    x: Tensor,
    weight: Tensor,
    bias: None,
    activation: str,
    initial_state: None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, None]:
    """Depthwise convolution and SiLU that see nothing before the first token of a sequence.

    Args:
        x: (rows, tokens, channels).
        weight: (channels, width).
        activation: ``silu`` or its other name, ``swish``.
        cu_seqlens: where sequences begin and end in the single row of ``x``; None where each row is one.

    Returns:
        (rows, tokens, channels) in the dtype of ``x``, and no state.
    """
    asked = bias is None and activation in ("silu", "swish") and initial_state is None and not output_final_state
    assert asked, "as Megatron calls it"
    convolved = causal_conv(x.flatten(0, 1), weight[:, None], _lengths(x, cu_seqlens))
    return F.silu(convolved).view_as(x), None


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, None]:
    """The gated delta rule, from an empty state at the start of every sequence.

    Args:
        query, key: (rows, tokens, heads, key_dim), normalised.
        value: (rows, tokens, heads, value_dim).
        g, beta: (rows, tokens, heads), logarithms of the decay, and how much of a value is written.
        cu_seqlens: as in :func:`causal_conv1d`.

    Returns:
        (rows, tokens, heads, value_dim) in the dtype of ``query``, computed in float32 or better; and no state.
    """
    asked = initial_state is None and not output_final_state and not use_qk_l2norm_in_kernel
    assert asked, "as Megatron calls it"
    scaled = query.to(torch.promote_types(query.dtype, torch.float32)) * query.shape[-1] ** -0.5
    queries, keys, values, decay, strength = (x.flatten(0, 1) for x in (scaled, key, value, g, beta))
    outputs = gated_delta_rule(queries, keys, values, decay, strength, _lengths(query, cu_seqlens))
    return outputs.view_as(value).to(query.dtype), None


def _lengths(x: Tensor, cu_seqlens: Tensor | None) -> Sequence[int]:
    """Of the sequences in the flattened rows of ``x``."""
    if cu_seqlens is None:
        return [x.shape[1]] * x.shape[0]
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths
