"""Context parallelism: which tokens a rank has, and attention and recurrence over sequences that several ranks share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.parallel.collectives import all_gather
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.prefix_tree import PrefixTree


@dataclass(frozen=True)
class TokenLayout:
    """One rank's N of the T tokens of a micro-batch, on the model's device. N is the same on every rank.

    Attributes:
        index: (N,) int64 into the T tokens, -1 for padding.
        position_ids: (N,) int64 within each sequence; padding at a sequence's end counts on.
        places: (T,) int64, where each token is in the N rows of every rank, one rank's after the other's.
        padding: (N,) bool, None where there is none.
        segments: which of the keys of all ranks the N tokens attend to.
        sequence_rows: how many of the N rows each sequence has, padding included; those at the end belong to none.
            Of a prefix tree, the rows that several share are the first one's.
    """

    index: Tensor
    position_ids: Tensor
    places: Tensor
    padding: Tensor | None
    segments: Segments
    sequence_rows: tuple[int, ...]

    def take(self, x: Tensor, fill: float) -> Tensor:
        """(T, ...) -> (N, ...): this rank's tokens, with ``fill`` for padding."""
        if self.padding is None:
            return x[self.index]
        rows = x[self.index.clamp(min=0)]
        return rows.masked_fill_(self.padding.view(-1, *(1,) * (x.dim() - 1)), fill)


def lay_out_tokens(
    seq_lens: Sequence[int], *, cp_size: int, cp_rank: int, multiple: int = 1, device: torch.device | None = None
) -> TokenLayout:
    """The tokens of rank ``cp_rank`` of ``cp_size``, in the order of the sequences.

    Each sequence is padded to a multiple of ``2 * cp_size`` and cut into ``2 * cp_size`` chunks. Rank r has chunk r and
    chunk ``2 * cp_size - 1 - r``, so that the causal mask leaves every rank the same work (Llama 3, arXiv 2407.21783,
    section 3.3.2). With one rank nothing is padded or cut.

    Args:
        seq_lens: B lengths of at least 1.
        multiple: N must be a multiple of this, because sequence parallelism shares the rows out over that many
            tensor-parallel ranks. One more sequence, of padding, fills up.
    """
    lengths, sequences = torch.tensor(seq_lens), torch.arange(len(seq_lens))
    chunk_lens, chunks_of_rank = (lengths, 1) if cp_size == 1 else (-(-lengths // (2 * cp_size)), 2)
    # Every rank has as many rows of a sequence, so that gathering needs no sizes.
    row_counts = chunks_of_rank * chunk_lens
    num_rows = int(row_counts.sum())
    filler = torch.arange(-num_rows % multiple)
    rows_of_rank, first_rows = num_rows + len(filler), _starts(row_counts)

    def places_of(sequences: Tensor, positions: Tensor) -> Tensor:
        lens = chunk_lens[sequences]
        chunks = positions // lens
        late = chunks >= cp_size
        ranks = torch.where(late, 2 * cp_size - 1 - chunks, chunks)
        return ranks * rows_of_rank + first_rows[sequences] + positions % lens + late * lens

    # The two chunks of the last rank are neighbours, which makes them one segment.
    first_chunks = [cp_rank] if cp_rank == cp_size - 1 else [cp_rank, 2 * cp_size - 1 - cp_rank]
    of_segment = sequences.repeat_interleave(len(first_chunks))
    query_lens = row_counts[of_segment] // len(first_chunks)
    first_queries = torch.tensor(first_chunks).repeat(len(seq_lens)) * chunk_lens[of_segment]
    # Keys after a segment's last query are hidden by the causal mask, so they are not gathered for it.
    key_lens = first_queries + query_lens
    key_index = places_of(of_segment.repeat_interleave(key_lens), _ranges(torch.zeros_like(key_lens), key_lens))

    of_row = sequences.repeat_interleave(row_counts)
    position_ids = _ranges(first_queries, query_lens)
    index = torch.where(position_ids < lengths[of_row], position_ids + _starts(lengths)[of_row], -1)
    places = places_of(sequences.repeat_interleave(lengths), _ranges(torch.zeros_like(lengths), lengths))

    # The filler is a separate segment: it attends to itself, and nothing attends to it.
    if len(filler):
        position_ids, index = torch.cat((position_ids, filler)), torch.cat((index, torch.full_like(filler, -1)))
        key_index = torch.cat((key_index, cp_rank * rows_of_rank + num_rows + filler))
        query_lens, key_lens = (torch.cat((lens, torch.tensor([len(filler)]))) for lens in (query_lens, key_lens))
    padding = index < 0
    return TokenLayout(
        index=index.to(device, non_blocking=True),
        position_ids=position_ids.to(device, non_blocking=True),
        places=places.to(device, non_blocking=True),
        padding=padding.to(device, non_blocking=True) if bool(padding.any()) else None,
        segments=Segments(
            query_lens=tuple(query_lens.tolist()),
            key_lens=tuple(key_lens.tolist()),
            cu_queries=_cumulative(query_lens).to(device, non_blocking=True),
            cu_keys=_cumulative(key_lens).to(device, non_blocking=True),
            key_index=None if cp_size == 1 else key_index.to(device, non_blocking=True),
        ),
        sequence_rows=tuple(row_counts.tolist()),
    )


def lay_out_tree(tree: PrefixTree, *, multiple: int = 1, device: torch.device | None = None) -> TokenLayout:
    """All rows of a prefix tree, each taken from the first of the tokens that it stands for; as of one rank alone.

    ``multiple``: as of :func:`lay_out_tokens`.
    """
    whole, places = tree.padded(multiple), tree.rows_of_tokens
    num_tokens = len(places)
    first = torch.full((whole.num_rows,), num_tokens).scatter_reduce_(0, places, torch.arange(num_tokens), "amin")
    padding = first == num_tokens
    return TokenLayout(
        index=first.masked_fill(padding, -1).to(device, non_blocking=True),
        position_ids=whole.position_ids.to(device, non_blocking=True),
        places=places.to(device, non_blocking=True),
        padding=padding.to(device, non_blocking=True) if bool(padding.any()) else None,
        segments=Segments.of_tree(whole, device),
        sequence_rows=tree.sequence_rows,
    )


def _starts(lens: Tensor) -> Tensor:
    return lens.cumsum(0) - lens


def _cumulative(lens: Tensor) -> Tensor:
    return torch.cat((lens.new_zeros(1), lens.cumsum(0))).to(torch.int32)


def _ranges(starts: Tensor, lens: Tensor) -> Tensor:
    """The numbers from each start on, as many as its length says, end to end."""
    return torch.arange(int(lens.sum())) + (starts - _starts(lens)).repeat_interleave(lens)


def attend_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    window: int | None,
    sinks: Tensor | None = None,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """:func:`~rl_backend.primitive.attention.packed_attention` of this rank's queries, from the keys and values of N tokens
    on each of the context-parallel ranks.

    With T tokens on all ranks together, a rank holds about ``4 * T * kv_heads * head_dim`` numbers while it selects from
    what it gathered; half of them stay until the backward pass, unless the layer is computed again.
    """
    # One collective before every attention (Llama 3, arXiv 2407.21783, section 3.3.2). A ring would hide the transfer behind
    # the work and hold less at a time, but needs a schedule and a merge of partial results for every mask; with
    # grouped-query attention there is little to transfer.
    both = gather_keys(torch.cat((key, value), dim=-1), segments, group)
    selected_key, selected_value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
    return packed_attention(query, selected_key, selected_value, segments, window, sinks)


def gather_keys(rows: Tensor, segments: Segments, group: dist.ProcessGroup) -> Tensor:
    """(N, ...) of every context-parallel rank -> (M, ...), those of the keys of this rank's segments. Backward, gradients of
    a row are added up.
    """
    assert segments.key_index is not None, "lay_out_tokens makes one for more than one rank"
    return all_gather(rows, group, sum_gradients=True).index_select(0, segments.key_index)


def gather_outputs(local: Tensor, layout: TokenLayout, group: dist.ProcessGroup) -> Tensor:
    """(N, ...) of every rank -> (T, ...) in the order of the micro-batch, without the padding. Every rank must compute the
    same loss from it: the backward pass takes this rank's part of the gradient, unreduced.
    """
    return all_gather(local, group, sum_gradients=False).index_select(0, layout.places)


class RecurrenceOverRanks:
    """Recurrent layers: states are passed along the ranks of ``group``. Each method, and its backward pass, is a collective.

    A chunk of :func:`lay_out_tokens` begins with the state that the one before it leaves. In a run of tokens the last state
    is affine in the first, S -> A S + B: every rank computes A and B of its chunks from its own tokens, all ranks gather
    those of all, and each works out the states that its chunks begin with. That is exact.
    """

    # It asks for no division of heads by ranks, and moves 2 * heads * key_dim * (key_dim + value_dim) numbers for a sequence
    # and rank, however long the sequence is. To exchange tokens for heads instead moves less only where a rank has few
    # tokens of each sequence: about 300 with 32 heads of 128 features in bfloat16.
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()

    def history(self, x: Tensor, width: int, segments: Segments) -> Tensor:
        """(N, features) of this rank's tokens -> (segments, width, features), those before each segment; 0 before a
        sequence's start.
        """
        rows = _history_rows(segments.query_lens, segments.key_lens, width, self.size, self.rank, x.device)
        last = all_gather(x.index_select(0, rows.sent), self.group, sum_gradients=True)
        known = torch.cat((last, last.new_zeros(1, last.shape[1])))
        before: Tensor = known.index_select(0, rows.before).unflatten(0, (len(segments.query_lens), width))
        return before

    def states(self, transitions: Tensor, segments: Segments) -> Tensor:
        """The states that this rank's segments begin with, (segments, heads, key_dim, value_dim).

        ``transitions`` are (segments, heads, key_dim, key_dim + value_dim), A beside B, of this rank's segments.
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
    sent: Tensor
    """int64, which of a rank's rows others may need, the same on every rank."""
    before: Tensor
    """(segments * width,) int64, where among those of all ranks the rows before each segment are; past their end before a
    sequence's first token."""


def _chunk_lens(query_lens: tuple[int, ...], key_lens: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """Tokens of one chunk of each sequence, the same on every rank, without the filler that may be the last segment."""
    if rank < ranks - 1:
        return query_lens[: len(query_lens) // 2 * 2 : 2]
    # Keys of tokens before these, which a filler does not have.
    return tuple(queries // 2 for queries, keys in zip(query_lens, key_lens, strict=True) if keys > queries)


# The layers of a model ask for the same in turn; only the first waits for a transfer to the device.
@lru_cache(maxsize=8)
def _history_rows(
    query_lens: tuple[int, ...], key_lens: tuple[int, ...], width: int, ranks: int, rank: int, device: torch.device
) -> _HistoryRows:
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
