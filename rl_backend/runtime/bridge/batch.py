"""Micro-batches as Megatron's models take them, and hidden states back as packed tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_backend.contracts import PackedBatch


@dataclass(frozen=True)
class LaidOut:
    """One micro-batch as (rows, columns) of tokens.

    Attributes:
        batch: the packed tokens, on the training device.
        inputs: keyword arguments of ``GPTModel.forward``.
        shape: (rows, columns); a padded batch has a row per sequence, a packed one a single row.
        places: (T,) where each packed token is in the columns-by-rows order of Megatron's hidden states.
    """

    batch: PackedBatch
    inputs: Mapping[str, Any]
    shape: tuple[int, int]
    places: Tensor

    def pack(self, hidden: Tensor) -> Tensor:
        """(columns, rows, H) -> (T, H)."""
        return hidden.flatten(0, 1).index_select(0, self.places)


def padded_shape(batch: PackedBatch, multiple: int) -> tuple[int, int]:
    """(sequences, longest sequence rounded up to a multiple): sequence parallelism splits the columns evenly."""
    return batch.num_sequences, _round_up(int(batch.seq_lens.max()), multiple)


def common_shape(shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The smallest shape that holds all."""
    return max(rows for rows, _ in shapes), max(columns for _, columns in shapes)


def lay_out_padded(batch: PackedBatch, shape: tuple[int, int], *, mark_padding: bool) -> LaidOut:
    """A row per sequence, padded on the right.

    Padding comes after the sequence, so the causal mask keeps it out of every real token; Megatron makes that mask itself.

    Args:
        mark_padding: tell the router which tokens are padding (True), so that they count in no balancing loss.
    """
    rows, columns = shape
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
    return LaidOut(batch, inputs, shape, column * rows + row)


def lay_out_packed(batch: PackedBatch, multiple: int, *, mark_padding: bool) -> LaidOut:
    """All sequences in one row ("thd"), for attention that takes their boundaries.

    Rounded up to a multiple by a sequence of padding at the end.

    Args:
        mark_padding: as in :func:`lay_out_padded`.
    """
    tokens = batch.num_tokens
    total = _round_up(tokens, multiple)
    device = batch.device
    lengths = [*batch.seq_lens.tolist(), *([total - tokens] if total > tokens else [])]
    boundaries = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    boundaries[1:] = torch.tensor(lengths).cumsum(0)
    boundaries = boundaries.to(device)
    padding = torch.zeros(total - tokens, dtype=torch.int64, device=device)
    longest = max(lengths)
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([batch.input_ids, padding])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).to(device)[None],
        "attention_mask": None,
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    }
    if mark_padding:
        inputs["padding_mask"] = torch.arange(total, device=device)[None] >= tokens
    return LaidOut(batch, inputs, (1, total), torch.arange(tokens, device=device))


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
