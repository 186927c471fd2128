"""Micro-batches as Megatron's model takes them: a padded row per sequence, or all packed in one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_backend.contracts import Head, PackedBatch
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.attention import Segments


@dataclass(frozen=True)
class LaidOut:
    """One micro-batch as (rows, columns) of tokens: a row per sequence if it is padded, else a single row.

    Attributes:
        batch: the T packed tokens, on the training device.
        inputs: keyword arguments of a chunk's ``forward``.
        places: (T,) where each packed token is in the columns-by-rows order of Megatron's hidden states.
        heads, adapters: the outputs of the pass, and which adapters work on which of the T tokens, as in ``ModelInput``.
        segments: the sequences among the T tokens; None without adapters.
    """

    batch: PackedBatch
    inputs: Mapping[str, Any]
    shape: tuple[int, int]
    places: Tensor
    heads: Sequence[Head] = ()
    adapters: tuple[AdapterRun, ...] = ()
    segments: Segments | None = None

    def pack(self, hidden: Tensor) -> Tensor:
        """(columns, rows, H) -> (T, H)."""
        return hidden.flatten(0, 1).index_select(0, self.places)

    def unpack(self, packed: Tensor) -> Tensor:
        """(T, H) -> (columns, rows, H), zeros for padding."""
        rows, columns = self.shape
        hidden = packed.new_zeros(columns * rows, packed.shape[1])
        # index_copy and index_add would keep what they copy for the backward pass.
        return hidden.index_put((self.places,), packed).view(columns, rows, -1)


def lay_out_padded(batch: PackedBatch, multiple: int, *, mark_padding: bool) -> LaidOut:
    """A row per sequence, padded on the right to a ``multiple``. ``mark_padding`` is for routers that balance."""
    # Padding comes after the sequence, so the causal mask, which Megatron makes itself, keeps it out of every real token.
    rows, columns = batch.num_sequences, _round_up(int(batch.seq_lens.max()), multiple)
    device = batch.device
    row, column = batch.sequence_ids, batch.position_ids
    input_ids = torch.zeros(rows, columns, dtype=torch.int64, device=device)
    input_ids[row, column] = batch.input_ids
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "position_ids": torch.arange(columns, device=device).expand(rows, columns),
        "attention_mask": None,
    }
    if mark_padding:
        is_padding = torch.ones(rows, columns, dtype=torch.bool, device=device)
        is_padding[row, column] = False
        inputs["padding_mask"] = is_padding
    return LaidOut(batch, inputs, (rows, columns), column * rows + row)


def lay_out_packed(batch: PackedBatch, multiple: int, *, mark_padding: bool) -> LaidOut:
    """All sequences in one row ("thd"), for attention that takes their boundaries. One of padding fills up to a
    ``multiple``.
    """
    tokens, device = batch.num_tokens, batch.device
    total = _round_up(tokens, multiple)
    padding = torch.arange(total - tokens, device=device)
    boundaries = batch.cu_seqlens
    if total > tokens:
        boundaries = torch.cat([boundaries, boundaries.new_tensor([total])])
    longest = max(int(batch.seq_lens.max()), total - tokens)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([batch.input_ids, torch.zeros_like(padding)])[None],
        "position_ids": torch.cat([batch.position_ids, padding])[None],
        "attention_mask": None,
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
    }
    if mark_padding:
        inputs["padding_mask"] = torch.arange(total, device=device)[None] >= tokens
    return LaidOut(batch, inputs, (1, total), torch.arange(tokens, device=device))


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
