"""Context parallelism: attention over sequences whose tokens several ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.parallel.collectives import all_gather
from rl_backend.parallel.token_layout import TokenLayout
from rl_backend.primitive.attention import Segments, packed_attention


class ContextParallelAttention:
    """Attention of this rank's queries to the keys and values of all context-parallel ranks.

    Keys and values are gathered in one collective before every attention, and its backward pass reduce-scatters their
    gradients (Llama 3, arXiv 2407.21783, section 3.3.2). A ring would hide the transfer behind the work and hold less at
    a time, but needs a schedule and a merge of partial results for every mask; with grouped-query attention there is
    little to transfer. With T tokens on all ranks together, a rank holds about ``4 * T * kv_heads * head_dim`` numbers
    while it selects from what it gathered; half of them stay until the backward pass, unless the layer is computed
    again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None) -> Tensor:
        """As :func:`~rl_backend.primitive.attention.packed_attention`, from the keys and values of this rank's N tokens."""
        assert segments.key_index is not None, "lay_out_tokens makes one for more than one rank"
        stacked = torch.stack((key, value), dim=1)
        gathered = all_gather(stacked, self._group, sum_gradients=True)
        selected_key, selected_value = gathered.index_select(0, segments.key_index).unbind(1)
        del gathered  # not needed by the backward pass
        return packed_attention(query, selected_key, selected_value, segments, window)


def gather_outputs(local: Tensor, layout: TokenLayout, group: dist.ProcessGroup) -> Tensor:
    """(N, ...) of every rank -> (T, ...) in the order of the micro-batch, without the padding.

    Every rank must compute the same loss from the result: the backward pass takes this rank's part of the gradient,
    unreduced.
    """
    return all_gather(local, group, sum_gradients=False).index_select(0, layout.places)
