"""From tokens to their sequences and back, in packed data."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_backend.contracts import BatchError


def sum_by_sequence(values: Tensor, seq_lens: Tensor) -> Tensor:
    """(T,) -> (B,): the sum over each sequence's tokens; differentiable.

    One sum per sequence instead of a scatter, because atomic additions on a GPU differ from run to run.

    Args:
        values: (T,).
        seq_lens: (B,) int64 on the CPU with sum T.
    """
    return torch.stack([part.sum() for part in torch.split(values, seq_lens.tolist())])


def broadcast_to_tokens(values: Tensor, seq_lens: Tensor) -> Tensor:
    """(B,) -> (T,): each sequence's value at all of its tokens.

    Args:
        values: (B,) on any device.
        seq_lens: (B,) int64 on the CPU.

    Raises:
        BatchError: ``values`` is not one number per sequence.
    """
    if values.shape != seq_lens.shape:
        raise BatchError(
            f"values has shape {tuple(values.shape)}; expected one number for each of the {seq_lens.shape[0]} sequences"
        )
    tokens = int(seq_lens.sum())
    return torch.repeat_interleave(values, seq_lens.to(values.device), output_size=tokens)


def check_packed(seq_lens: Tensor, **tensors: Tensor) -> None:
    """Raises :class:`BatchError` for a tensor, given by its name, that is not (T,) with T the sum of ``seq_lens``."""
    tokens = int(seq_lens.sum())
    for name, tensor in tensors.items():
        if tensor.shape != (tokens,):
            raise BatchError(f"{name} has shape {tuple(tensor.shape)}; expected ({tokens},), the sum of seq_lens", name=name)


def check_finite(loss_mask: Tensor, **tensors: Tensor) -> None:
    """Raises :class:`BatchError` for a (T,) tensor, given by its name, that is not finite where ``loss_mask`` is not 0."""
    for name, tensor in tensors.items():
        bad = torch.nonzero((loss_mask != 0) & ~torch.isfinite(tensor)).flatten().tolist()
        if bad:
            raise BatchError(
                f"{name}[{bad[0]}] is {tensor[bad[0]].item()}; every selected token needs a finite one", name=name
            )
