"""Short depthwise convolution over packed sequences, which sees nothing before a sequence's first token."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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
    return _Rows((outputs + room).to(device), before.to(device), outputs.to(device))


class _Convolution(torch.autograd.Function):
    """(rows, channels) and (channels, width) -> (rows - width + 1, channels). Keeps its inputs alone: shifted products by
    autograd would keep one more copy of the rows for every tap.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(rows, taps)
        wide, by_tap = _wide(rows), _wide(taps).t().contiguous()
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
        wide, by_tap, wide_grad = _wide(rows), _wide(taps).t().contiguous(), _wide(grad)
        grad_rows, grad_taps = torch.zeros_like(wide), torch.empty_like(by_tap)
        for tap in range(len(by_tap)):
            if needs_rows:
                grad_rows[tap : tap + len(grad)].addcmul_(wide_grad, by_tap[tap])
            if needs_taps:
                torch.sum(wide[tap : tap + len(grad)] * wide_grad, 0, out=grad_taps[tap])
        of_rows = grad_rows.to(rows.dtype) if needs_rows else None
        return of_rows, grad_taps.t().contiguous().to(taps.dtype) if needs_taps else None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
