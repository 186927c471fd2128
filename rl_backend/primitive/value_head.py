"""The head of a critic, and those of LoRA tenants."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.float32 import wide_dtype
from rl_backend.primitive.log_prob import IGNORE_LABEL


class ValueHead(nn.Linear):
    """``hidden @ weight.T + bias``, one number per token; (T, hidden_size) -> (T,) float32 (float64 for float64)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        # bfloat16 would leave a value three significant digits.
        dtype = wide_dtype(hidden.dtype)
        # A sum of its own, not a view of a product: FSDP's hook would be lost when a loss changes a view in place.
        return torch.mv(hidden.to(dtype), self.weight[0].to(dtype)) + self.bias.to(dtype)


def values_of_tenants(hidden: Tensor, others: Tensor, runs: Sequence[AdapterRun], *, counts: bool = True) -> Tensor:
    """Values of the rows whose tenant has a head, as :class:`ValueHead` gives them, and ``others`` of the rest.

    Gradients of the heads go straight into their buffers, where this rank ``counts`` among those that compute the same.
    """
    if not any(run.head is not None for run in runs):
        return others
    values: Tensor = _ValuesOfTenants.apply(hidden, others, runs, counts)
    return values


def labels_without_values(labels: Tensor, runs: Sequence[AdapterRun]) -> Tensor:
    """``labels``, (T,) or (T, K), with -100 for the rows whose tenant has a value head in place of the vocabulary's."""
    valued = [run for run in runs if run.head is not None]
    labels = labels.clone() if valued else labels
    for run in valued:
        labels[run.start : run.stop] = IGNORE_LABEL
    return labels


class _ValuesOfTenants(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, others: Tensor, runs: Sequence[AdapterRun], counts: bool) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.work = [(slice(run.start, run.stop), run.head) for run in runs if run.head is not None]
        ctx.counts = counts
        values = others.clone()
        for rows, head in ctx.work:
            # Row by row: a product of matrix and vector would depend on where in memory the rows begin.
            values[rows] = (hidden[rows].to(values.dtype) * head.weight).sum(-1) + head.bias
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        grad_hidden, grad_others = torch.zeros_like(hidden), grad.clone()
        for rows, head in ctx.work:
            of_value = grad[rows, None]
            # The other head's values of these rows have been replaced.
            grad_others[rows] = 0.0
            grad_hidden[rows] = of_value * head.weight
            if ctx.counts:
                head.grad_weight.add_((of_value * hidden[rows]).sum(0))
                head.grad_bias.add_(of_value.sum(0))
        return grad_hidden, grad_others, None, None
