"""The gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464) over packed sequences, in chunks of tokens.

Each head has a state S, (key_dim, value_dim), which is 0 before a sequence's first token. With a decay g <= 0 and a write
strength beta of each token:

    S <- exp(g) S
    S <- S + k (beta (v - k^T S))^T
    o  = q^T S

Inside a chunk the writes solve a triangular system (section 3.3; the WY form of Yang et al., arXiv 2406.06484): a chunk
is matrix products, and only states go from chunk to chunk. States and what leads to them are float32 or better.
"""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rl_backend.primitive.float32 import widened
from rl_backend.primitive.prefix_tree import take_rows

CHUNK = 64
"""Tokens of a chunk: products of a size that libraries are good at, while the triangular system stays cheap."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    seq_lens: Sequence[int],
    parents: Sequence[int] = (),
) -> Tensor:
    """The outputs of sequences that start from empty states; (T, heads, value_dim), float32 or better.

    Args:
        query, key: (T, key_heads, key_dim), normalised and scaled.
        value: (T, heads, value_dim); key head i is that of the value heads from ``i * heads / key_heads`` on.
        decay: (T, heads), g, logarithms of what a state is multiplied by.
        beta: (T, heads), from 0 to 1.
        seq_lens: S lengths of at least 1, which add up to T.
        parents: the sequence before it that each continues, from the state that this one ends with; -1 for none. Empty
            where none does. See :class:`~rl_backend.primitive.prefix_tree.PrefixTree`.
    """
    return ChunkedDeltaRule(query, key, value, decay, beta, seq_lens, parents).outputs()


def l2_normalised(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x ** 2) + 1e-6)`` over the last dimension, float32 or better; short vectors stay shorter than 1."""
    wide = widened(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


class Chunks(NamedTuple):
    """Packed sequences cut into chunks, none of which has tokens of two sequences.

    Chunks are in the order of the scan: the first chunk of every sequence that continues none, those that end last first,
    then the next chunk of all that have one, and so on. A sequence that continues another begins in the step after the
    other's last chunk. A step works on neighbours, and on the first of the states that the step before has left, where it
    begins no sequence.
    """

    places: Tensor  # (T,) int64, the place of each token in the flattened chunks
    steps: tuple[int, ...]  # how many sequences have a chunk in each step
    order: Tensor  # (S,) int64, the sequences by their ends, the last first
    ranks: Tensor  # (S,) int64, where each sequence is in it
    forks: tuple[Tensor | None, ...]  # of each step int64, the states of the step before to go on from; None for the first

    @property
    def num_chunks(self) -> int:
        return sum(self.steps)


@lru_cache(maxsize=8)
def chunks_of(seq_lens: tuple[int, ...], device: torch.device, parents: tuple[int, ...] = ()) -> Chunks:
    # The layers of a model ask for the same in turn; only the first waits for a transfer to the device.
    with torch.device("cpu"):
        lengths = torch.tensor(seq_lens)
        counts = (lengths + CHUNK - 1) // CHUNK
        begins = _first_steps(counts.tolist(), parents)
        ends = begins + counts
        order = ends.argsort(descending=True, stable=True)
        ranks = order.argsort()
        times = torch.arange(int(ends.max()))[:, None]
        at_work = (begins <= times) & (times < ends)
        steps = at_work.sum(1)
        # (steps, S): where a sequence is among those of a step, which are in the order above.
        slots = (at_work[:, order].cumsum(1) - 1)[:, ranks]
        sequences = torch.arange(len(seq_lens)).repeat_interleave(lengths)
        positions = torch.arange(len(sequences)) - (lengths.cumsum(0) - lengths)[sequences]
        at = begins[sequences] + positions // CHUNK
        chunks = (steps.cumsum(0) - steps)[at] + slots[at, sequences]
        places = chunks * CHUNK + positions % CHUNK
        forks: list[Tensor | None] = [None] * len(steps)
        for step in begins[begins > 0].unique().tolist():
            working = order[at_work[step, order]]
            before = torch.where(begins[working] == step, torch.tensor(parents)[working], working)
            forks[step] = slots[step - 1, before].to(device, non_blocking=True)
    places, order, ranks = (each.to(device, non_blocking=True) for each in (places, order, ranks))
    return Chunks(places, tuple(steps.tolist()), order, ranks, tuple(forks))


def _first_steps(counts: Sequence[int], parents: Sequence[int]) -> Tensor:
    """(S,) int64: a sequence of ``counts`` chunks begins when its parent has ended."""
    begins = [0] * len(counts)
    for sequence, parent in enumerate(parents):
        begins[sequence] = 0 if parent < 0 else begins[parent] + counts[parent]
    return torch.tensor(begins)


class ChunkedDeltaRule:
    """The rule on given tokens, from states that may be known later; arguments as of :func:`gated_delta_rule`."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        seq_lens: Sequence[int],
        parents: Sequence[int] = (),
    ) -> None:
        self.chunks = chunks_of(tuple(seq_lens), value.device, tuple(parents))
        self.heads, self.key_dim, self.value_dim = value.shape[1], key.shape[2], value.shape[2]
        key_heads = key.shape[1]
        # (chunks, key heads, value heads of a key head, CHUNK, features)
        q, k = (self._chunked(x, x.shape[1])[:, :, None] for x in (query, key))
        v = self._chunked(value, self.heads).unflatten(1, (key_heads, -1))
        g, b = (self._chunked(x[..., None], self.heads).unflatten(1, (key_heads, -1)) for x in (decay, beta))
        hidden = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu_(1)
        # The running sum of g, as CUDA can compute it deterministically. In float64: behind a token that forgets, what is
        # left between two tokens is a small difference of large sums.
        total = g.mT.double().masked_fill(hidden, 0.0).sum(-1)
        since_start = total.to(v.dtype).exp()[..., None]
        last = total[..., -1:]
        # Hidden before the exponential: above the diagonal it may overflow, and infinity times 0 has no gradient.
        between = (total[..., :, None] - total[..., None, :]).to(v.dtype).masked_fill(hidden, -torch.inf).exp()
        # (I + lower)^-1 applied to both; neither the diagonal, of ones, nor what is above it is read.
        lower = k @ k.mT * between * b
        right = torch.cat((b * v, b * since_start * k), dim=-1)
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        self.written, self.erased = self._flat(solved).split((self.value_dim, self.key_dim), dim=-1)
        self.attention = self._flat(q @ k.mT * between)
        self.from_state = self._flat(q * since_start)
        self.to_state = self._flat(k * (last - total).to(v.dtype).exp()[..., None])
        self.kept = self._flat(since_start[..., -1:, :])

    def outputs(self, initial: Tensor | None = None) -> Tensor:
        """(T, heads, value_dim), from (S, heads, key_dim, value_dim) states before the sequences; None for 0, and where some
        continue others.
        """
        if initial is None:
            state = self.written.new_zeros(self.chunks.steps[0] * self.heads, self.key_dim, self.value_dim)
        else:
            state = initial.index_select(0, self.chunks.order).flatten(0, 1)
        states, news, _ = self._scan(self.written, state, to_the_end=False)
        out = torch.baddbmm(self.attention @ torch.cat(news), self.from_state, torch.cat(states))
        tokens: Tensor = out.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(0, 1)
        return tokens.index_select(0, self.chunks.places)

    def transitions(self) -> Tensor:
        """What each sequence does to a state: S -> A S + B; (S, heads, key_dim, key_dim + value_dim), A beside B.

        No sequence may continue another.
        """
        count = self.chunks.steps[0] * self.heads
        identity = torch.eye(self.key_dim, dtype=self.written.dtype, device=self.written.device)
        nothing = identity.new_zeros(self.key_dim, self.value_dim)
        state = torch.cat((identity, nothing), dim=-1).expand(count, -1, -1)
        unwritten = self.written.new_zeros(*self.written.shape[:-1], self.key_dim)
        *_, last = self._scan(torch.cat((unwritten, self.written), dim=-1), state, to_the_end=True)
        states: Tensor = last.unflatten(0, (-1, self.heads))
        return states.index_select(0, self.chunks.ranks)

    def _scan(self, written: Tensor, state: Tensor, *, to_the_end: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Carries (sequences * heads, key_dim, features) through all steps: states before each step, what tokens write, and
        the states after each sequence.

        Args:
            written: (chunks * heads, CHUNK, features), what the tokens would write to a state of 0.
            to_the_end: whether the states after the last chunks are wanted.
        """
        sizes = [step * self.heads for step in self.chunks.steps]
        parts = (x.split(sizes) for x in (written, self.erased, self.to_state, self.kept))
        states: list[Tensor] = []
        news: list[Tensor] = []
        ended: list[Tensor] = []
        following = [*sizes[1:], 0]
        forks = (*self.chunks.forks[1:], None)
        for size, fork, written_now, erased, to_state, kept in zip(following, forks, *parts, strict=True):
            states.append(state)
            news.append(torch.baddbmm(written_now, erased, state, alpha=-1))
            if size or to_the_end:
                after = torch.baddbmm(state * kept, to_state.mT, news[-1])
                state = after[:size] if fork is None else self._forked(after, fork)
                ended.append(after[size:])
        # Those that end first have the highest places.
        return states, news, torch.cat(ended[::-1]) if ended else state

    def _forked(self, states: Tensor, fork: Tensor) -> Tensor:
        """(sequences * heads, ...) -> the same of the sequences ``fork``; gradients of one taken twice are added up."""
        return take_rows(states.unflatten(0, (-1, self.heads)), fork).flatten(0, 1)

    def _chunked(self, x: Tensor, heads: int) -> Tensor:
        """(T, heads, features) -> (chunks, heads, CHUNK, features), 0 in places without a token, which change no state."""
        wide = widened(x)
        places = wide.new_zeros(self.chunks.num_chunks * CHUNK, heads, x.shape[-1])
        chunks: Tensor = places.index_copy_(0, self.chunks.places, wide).unflatten(0, (-1, CHUNK))
        return chunks.transpose(1, 2).contiguous()

    @staticmethod
    def _flat(x: Tensor) -> Tensor:
        """(chunks, key heads, value heads of a key head, ...) -> (chunks * heads, ...)."""
        return x.flatten(0, 2)


def has_fla() -> bool:
    """Whether flash-linear-attention, which is no dependency of this package, is installed."""
    return importlib.util.find_spec("fla") is not None


def fla_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """As :func:`gated_delta_rule`, with float32 states between bfloat16 products; in the dtype of ``value``, of 16 bits.

    Args:
        cu_seqlens: (S + 1,), where each sequence starts, on the device.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    groups = value.shape[1] // key.shape[1]
    query, key = (x.to(value.dtype).repeat_interleave(groups, dim=1) for x in (query, key))
    rows = (x[None].contiguous() for x in (query, key, value, decay, beta))
    # The queries are scaled already.
    out, _ = chunk_gated_delta_rule(*rows, scale=1.0, cu_seqlens=cu_seqlens.to(torch.int64))
    outputs: Tensor = out[0]
    return outputs
