"""Gated DeltaNet in vLLM 0.30's CPU build, for every dtype and head size.

vLLM's own kernel there takes bfloat16 and heads of 64 or 128 features. For all else:

* weights of the convolution are packed for it as they are loaded, on machines with AVX512-BF16, which fails in float32;
* the operator refuses float32 ("CPU GDN attention requires BF16") and other heads ("Unexpected head dim size");

and whatever computes, a first token that comes alone, a prompt of one token for instance, continues from what the sequence
before it left in its slot, because vLLM counts it as a decode (vllm-project/vllm#51562). Counted as a prompt, and alone in a
step, it meets another check: "causal_conv1d_fwd_cpu: expect x to be transposed".

The operator here computes in float32 in plain torch, by chunks for prompts and token by token for responses, in the state
caches that vLLM keeps. It shares no code with the trainer's mixer, so that comparing the two checks both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

# Features of a head that vLLM's own kernel takes, in bfloat16, keys and values alike.
KERNEL_HEADS = (64, 128)
_CHUNK = 64


def serve_every_deltanet() -> None:
    """From now on this process serves gated DeltaNet of any dtype and head size. Does nothing but on a CPU."""
    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.attention.backends import gdn_attn

    # Before a model is built: the operator is registered with the first layer.
    compute, pack = gdn_attention.cpu_gdn_attention_core, _custom_ops.causal_conv1d_weight_pack
    split = gdn_attn.split_decodes_and_prefills

    # vLLM derives the operator's schema from these annotations, which it looks up in this module.
    def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is None:  # vLLM measures how much memory it needs
            return
        if _kernel_serves(layer, mixed_qkv.dtype):
            # One row of a wider matrix counts as contiguous, and vLLM's convolution refuses its stride.
            rows = mixed_qkv.clone(memory_format=torch.contiguous_format) if len(mixed_qkv) == 1 else mixed_qkv
            compute(rows, b, a, core_attn_out, layer_name)
        else:
            _compute(layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)

    def pack_for_kernel(weight: Tensor) -> Tensor:
        packed: Tensor = pack(weight) if weight.dtype == torch.bfloat16 else weight
        return packed

    def split_by_state(metadata: Any, decode_threshold: int = 1, **options: Any) -> tuple[int, int, int, int]:
        # Decodes are those that have a state; vLLM's rule is one token or less.
        by_length = metadata.is_prefilling is None
        counts: tuple[int, int, int, int] = split(
            metadata, decode_threshold, **options, treat_short_extends_as_decodes=by_length
        )
        return counts

    gdn_attention.cpu_gdn_attention_core = core
    _custom_ops.causal_conv1d_weight_pack = pack_for_kernel
    gdn_attn.split_decodes_and_prefills = split_by_state


def _kernel_serves(layer: Any, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and layer.head_k_dim == layer.head_v_dim and layer.head_k_dim in KERNEL_HEADS


class _Rows(NamedTuple):
    """Sequences of one padded length.

    Attributes:
        slots: (n,) int64, where their states are.
        tokens: (n, length) int64, their tokens; any token where ``real``, (n, length) bool, is False.
        lengths: (n,) int64.
        continued: (n,) bool, whether there are states yet.
    """

    slots: Tensor
    tokens: Tensor
    real: Tensor
    lengths: Tensor
    continued: Tensor


def _compute(layer: Any, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Writes (T, value heads, value dim) into ``out`` and states into the layer's caches.

    Args:
        mixed_qkv: (T, channels), queries, keys and values before the convolution, all sequences one after the other.
        b, a: (T, value heads), logits of the write strength and of the decay.
    """
    count = metadata.num_decodes + metadata.num_prefills
    starts = metadata.non_spec_query_start_loc[: count + 1].long()
    slots = metadata.non_spec_state_indices_tensor[:count].long()
    continued = metadata.has_initial_state  # None where there are decodes alone
    continued = torch.ones(count, dtype=torch.bool) if continued is None else continued[:count]
    lengths = starts.diff()
    # One token stays one; others are padded so that sequences of about the same length are computed together.
    step = torch.where(lengths > _CHUNK, _CHUNK, 16)
    padded = torch.where(lengths > 1, (lengths + step - 1) // step * step, lengths)
    for length in filter(None, padded.unique().tolist()):
        chosen = (padded == length).nonzero()[:, 0]
        place = torch.arange(length)
        tokens = (starts[chosen][:, None] + place).clamp(max=len(mixed_qkv) - 1)
        real = place < lengths[chosen][:, None]
        rows = _Rows(slots[chosen], tokens, real, lengths[chosen], continued[chosen])
        query, key, value = _convolved(layer, rows, mixed_qkv)
        decay = -layer.A_log.float().exp() * F.softplus(a[tokens].float() + layer.dt_bias.float())
        # A token of padding leaves the state as it is: nothing decays and nothing is written.
        decay, beta = (x.masked_fill(~real[..., None], 0.0) for x in (decay, b[tokens].float().sigmoid()))
        states = _states(layer)
        before = states[rows.slots].float().masked_fill(~rows.continued[:, None, None, None], 0.0)
        values, after = _delta_rule(query, key, value, decay, beta, before)
        out[tokens[real]] = values[real].to(out.dtype)
        states[rows.slots] = after.to(states.dtype)


def _convolved(layer: Any, rows: _Rows, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, (n, length, value heads, key dim), normalised and queries scaled, and values; float32."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    # Packed for vLLM's kernel, the weight is kept as it was loaded too.
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
    weight = weight.reshape(weight.shape[0], 1, -1).float()
    cache = layer.kv_cache[0].transpose(-1, -2) if is_conv_state_dim_first() else layer.kv_cache[0]
    history = cache[rows.slots].float().masked_fill(~rows.continued[:, None, None], 0.0)
    inputs = torch.cat((history, mixed_qkv[rows.tokens].float()), dim=1)  # (n, width - 1 + length, channels)
    # The convolution's last inputs are kept for the token after.
    last = rows.lengths[:, None] + torch.arange(history.shape[1])
    cache[rows.slots] = inputs.gather(1, last[..., None].expand(-1, -1, inputs.shape[-1])).to(cache.dtype)
    mixed = F.silu(F.conv1d(inputs.mT, weight, groups=len(weight))).mT
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    query, key, value = mixed.split((keys, keys, values), dim=-1)
    query, key = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (query, key))
    value = value.unflatten(-1, (-1, layer.head_v_dim))
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    groups = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
    return query * layer.head_k_dim**-0.5, key, value


def _states(layer: Any) -> Tensor:
    # vLLM names the last two dimensions the other way round: they are key dim, value dim.
    cache: Tensor = layer.kv_cache[1]
    slots, heads, value_dim, key_dim = cache.shape
    return cache.view(slots, heads, key_dim, value_dim)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """``S <- exp(decay) S; S <- S + key (beta (value - S^T key))^T; out = S^T query``, in chunks.

    Yang et al., arXiv 2412.06464, section 3.3: within a chunk the values that are written solve a triangular system.

    Args:
        query, key: (n, length, heads, key dim).
        value: (n, length, heads, value dim).
        decay, beta: (n, length, heads); ``decay`` is at most 0.
        state: (n, heads, key dim, value dim).

    Returns:
        As ``value`` and ``state``.
    """
    length = value.shape[1]
    chunk = min(length, _CHUNK)
    # (n, chunks, heads, chunk, ...)
    q, k, v, g, b = (
        x.unflatten(1, (length // chunk, chunk)).transpose(2, 3) for x in (query, key, value, decay, beta[..., None])
    )
    total = g.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    from_start, to_end = total[..., None].exp(), (total[..., -1:] - total)[..., None].exp()
    lower = (b * k @ k.mT * between).tril(-1)
    sides = torch.cat((b * v, b * k * from_start), dim=-1)
    written, erased = torch.linalg.solve_triangular(lower, sides, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), dim=-1
    )
    attention, kept = q @ k.mT * between, total[..., -1:, None].exp()
    outputs = []
    for index in range(length // chunk):
        new = written[:, index] - erased[:, index] @ state
        outputs.append((q * from_start)[:, index] @ state + attention[:, index] @ new)
        state = state * kept[:, index] + (k * to_end)[:, index].mT @ new
    return torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2), state
