"""Context parallelism of recurrent layers: states are passed along the ranks that share a sequence.

Ranks have two chunks of each sequence (:func:`~rl_backend.parallel.context.lay_out_tokens`), and a chunk begins with the
state that the one before it leaves. In a run of tokens the last state is affine in the first, S -> A S + B: every rank
computes A and B of its chunks from its own tokens, all ranks gather those of all, and each works out the states that its
chunks begin with. That is exact, asks for no division of heads by ranks, and moves 2 * heads * key_dim * (key_dim +
value_dim) numbers for a sequence and rank, however long the sequence is. To exchange tokens for heads instead would move all
queries, keys, values, gates and outputs: less only where a rank has few tokens of each sequence, about 300 with 32 heads of
128 features in bfloat16.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.parallel.collectives import all_gather
from rl_backend.primitive.attention import Segments


class RecurrenceOverRanks:
    """What chunks of sequences begin with, for the ranks of ``group``.

    Every rank takes part in both collectives of a layer, and in those of their backward passes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()

    def history(self, x: Tensor, width: int, segments: Segments) -> Tensor:
        """The ``width`` tokens before each of this rank's segments.

        Args:
            x: (N, features), of this rank's tokens.

        Returns:
            (segments, width, features), 0 before a sequence's first token.
        """
        rows = _history_rows(segments.query_lens, segments.key_lens, width, self.size, self.rank, x.device)
        last = all_gather(x.index_select(0, rows.sent), self.group, sum_gradients=True)
        known = torch.cat((last, last.new_zeros(1, last.shape[1])))
        before: Tensor = known.index_select(0, rows.before).unflatten(0, (len(segments.query_lens), width))
        return before

    def states(self, transitions: Tensor, segments: Segments) -> Tensor:
        """The states that this rank's segments begin with.

        Args:
            transitions: (segments, heads, key_dim, key_dim + value_dim), A beside B, of this rank's segments.

        Returns:
            (segments, heads, key_dim, value_dim)
        """
        parts = _chunk_lens(segments.query_lens, segments.key_lens, self.size, self.rank)
        sequences, key_dim = len(parts), transitions.shape[-2]
        is_last = self.rank == self.size - 1
        own = transitions[: sequences * (1 if is_last else 2)].unflatten(0, (sequences, -1))
        if is_last:
            # Its chunks are neighbours and one segment; after it the state stays.
            same = torch.eye(key_dim, transitions.shape[-1], dtype=own.dtype, device=own.device)
            own = torch.cat((own, same.expand_as(own)), dim=1)
        each = all_gather(own[None], self.group, sum_gradients=True)
        begins: list[Tensor] = []
        state = transitions.new_zeros(sequences, *transitions.shape[1:-1], transitions.shape[-1] - key_dim)
        # Chunks of a sequence in their order: the first ones of all ranks, and back.
        for step in range(2 * self.size):
            rank = min(step, 2 * self.size - 1 - step)
            if rank == self.rank:
                begins.append(state)
            if step < 2 * self.size - 1:
                chunk = each[rank, :, step // self.size]
                state = chunk[..., :key_dim] @ state + chunk[..., key_dim:]
        found = torch.stack(begins[:1] if is_last else begins, dim=1).flatten(0, 1)
        filler = found.new_zeros(len(transitions) - len(found), *found.shape[1:])
        return torch.cat((found, filler))


class _HistoryRows(NamedTuple):
    """Attributes:
    sent: int64, which of a rank's rows others may need, the same on every rank.
    before: (segments * width,) int64, where among those of all ranks the rows before each segment are; one more than there
        are of them before a sequence's first token.
    """

    sent: Tensor
    before: Tensor


def _chunk_lens(query_lens: tuple[int, ...], key_lens: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """Of each sequence, without the filler that may be the last segment: tokens of one of its chunks, as every rank has."""
    if rank < ranks - 1:
        return query_lens[: len(query_lens) // 2 * 2 : 2]
    # Keys of tokens before these, which a filler does not have.
    return tuple(queries // 2 for queries, keys in zip(query_lens, key_lens, strict=True) if keys > queries)


@lru_cache(maxsize=8)
def _history_rows(
    query_lens: tuple[int, ...], key_lens: tuple[int, ...], width: int, ranks: int, rank: int, device: torch.device
) -> _HistoryRows:
    """The layers of a model ask for the same in turn; only the first waits for a transfer to the device."""
    parts = _chunk_lens(query_lens, key_lens, ranks, rank)
    sent: list[int] = []
    place: dict[tuple[int, int, int], int] = {}  # sequence, which of its rank's chunks, tokens to the chunk's end
    row = 0
    for sequence, length in enumerate(parts):
        for chunk in range(2):
            row += length
            for back in range(min(width, length), 0, -1):
                place[sequence, chunk, back] = len(sent)
                sent.append(row - back)
    before: list[int] = []
    segments_of_sequence = 1 if rank == ranks - 1 else 2
    for segment, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        sequence, begin = segment // segments_of_sequence, keys - queries
        for position in range(begin - width, begin):
            if position < 0:
                before.append(ranks * len(sent))
                continue
            length = parts[sequence]
            number = position // length
            owner, chunk = (number, 0) if number < ranks else (2 * ranks - 1 - number, 1)
            before.append(owner * len(sent) + place[sequence, chunk, length - position % length])
    # Both are empty where a convolution sees one token.
    return _HistoryRows(*(torch.tensor(rows, dtype=torch.int64, device=device) for rows in (sent, before)))
