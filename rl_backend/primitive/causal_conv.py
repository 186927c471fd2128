"""Short depthwise convolution over packed sequences, which sees nothing before a sequence's first token."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_backend.primitive.float32 import widened
from rl_backend.primitive.prefix_tree import take_rows


class CausalConv(nn.Module):
    """The module of :func:`causal_conv`; ``weight`` is (channels, 1, width)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))

    def forward(self, x: Tensor, seq_lens: Sequence[int], history: Tensor | None = None) -> Tensor:
        return causal_conv(x, self.weight, seq_lens, history)


def causal_conv(x: Tensor, weight: Tensor, seq_lens: Sequence[int], history: Tensor | None = None) -> Tensor:
    """``y[t] = sum_k weight[:, width - 1 - k] * x[t - k]`` for the tokens of one sequence; computed in float32 or better.

    ``x`` is (T, channels) and ``weight`` (channels, 1, width), as of ``nn.Conv1d``; ``history``, (S, width - 1,
    channels), comes before the sequences' first tokens, zeros for None.
    """
    taps, width = weight.squeeze(1), weight.shape[-1]
    if len(seq_lens) == 1:
        before = x.new_zeros(width - 1, x.shape[1]) if history is None else history[0].to(x.dtype)
        whole: Tensor = _Convolution.apply(torch.cat((before, x)), taps)
        return whole
    rows = _rows(tuple(seq_lens), width - 1, x.device)
    padded = x.new_zeros(len(x) + len(rows.before), x.shape[1]).index_copy_(0, rows.tokens, x)
    if history is not None:
        padded = padded.index_copy_(0, rows.before, history.flatten(0, 1).to(x.dtype))
    convolved: Tensor = _Convolution.apply(padded, taps)
    return convolved.index_select(0, rows.outputs)


def path_history(x: Tensor, seq_lens: Sequence[int], parents: Sequence[int], room: int) -> Tensor | None:
    """The ``history`` of sequences that continue others: the last tokens before each, of its parent and of what this one
    continues where it is short; 0 before the first.

    Args:
        x: (T, channels).
        parents: the sequence before it that each continues, -1 for none.
        room: tokens before each.

    Returns:
        (S, room, channels); None where nothing is before any sequence.
    """
    rows = _path_rows(tuple(seq_lens), tuple(parents), room, x.device)
    if not len(rows.taken):
        return None
    history = x.new_zeros(len(seq_lens) * room, x.shape[1]).index_copy_(0, rows.places, take_rows(x, rows.taken))
    before: Tensor = history.unflatten(0, (len(seq_lens), room))
    return before


class _PathRows(NamedTuple):
    taken: Tensor  # int64, rows of tokens that are in the room before a sequence
    places: Tensor  # int64, where in it, of (S * room,)


@lru_cache(maxsize=8)
def _path_rows(seq_lens: tuple[int, ...], parents: tuple[int, ...], room: int, device: torch.device) -> _PathRows:
    taken: list[int] = []
    places: list[int] = []
    last: list[list[int]] = []  # rows of the last tokens of each sequence and of those before it, at most the room
    row = 0
    for sequence, (length, parent) in enumerate(zip(seq_lens, parents, strict=True)):
        before = last[parent] if parent >= 0 else []
        end = (sequence + 1) * room
        taken += before
        places += range(end - len(before), end)
        row += length
        path = [*before, *range(row - min(length, room), row)]
        last.append(path[max(0, len(path) - room) :])
    return _PathRows(*(torch.tensor(rows, dtype=torch.int64, device=device) for rows in (taken, places)))


class _Rows(NamedTuple):
    """Sequences with room before each of them."""

    tokens: Tensor  # (T,) int64, the row of each token
    before: Tensor  # (S * room,) int64, the rows before the sequences
    outputs: Tensor  # (T,) int64, the row of each token's output


@lru_cache(maxsize=8)
def _rows(seq_lens: tuple[int, ...], room: int, device: torch.device) -> _Rows:
    # The layers of a model ask for the same in turn; only the first waits for a transfer to the device.
    lengths = torch.tensor(seq_lens, device="cpu")
    sequences = torch.arange(len(seq_lens), device="cpu")
    outputs = torch.arange(sum(seq_lens), device="cpu") + room * sequences.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths + room * sequences
    before = (starts[:, None] + torch.arange(room, device="cpu")).flatten()
    return _Rows(*(rows.to(device, non_blocking=True) for rows in (outputs + room, before, outputs)))


class _Convolution(torch.autograd.Function):
    """(rows, channels) and (channels, width) -> (rows - width + 1, channels). Keeps its inputs alone: shifted products by
    autograd would keep one more copy of the rows for every tap.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(rows, taps)
        wide, by_tap = widened(rows), widened(taps).t().contiguous()
        outputs = len(rows) - len(by_tap) + 1
        convolved = wide[:outputs] * by_tap[0]
        for tap in range(1, len(by_tap)):
            convolved.addcmul_(wide[tap : tap + outputs], by_tap[tap])
        return convolved.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, taps = ctx.saved_tensors
        needs_rows, needs_taps = ctx.needs_input_grad
        wide, by_tap, wide_grad = widened(rows), widened(taps).t().contiguous(), widened(grad)
        grad_rows, grad_taps = torch.zeros_like(wide), torch.empty_like(by_tap)
        for tap in range(len(by_tap)):
            if needs_rows:
                grad_rows[tap : tap + len(grad)].addcmul_(wide_grad, by_tap[tap])
            if needs_taps:
                torch.sum(wide[tap : tap + len(grad)] * wide_grad, 0, out=grad_taps[tap])
        of_rows = grad_rows.to(rows.dtype) if needs_rows else None
        return of_rows, grad_taps.t().contiguous().to(taps.dtype) if needs_taps else None
