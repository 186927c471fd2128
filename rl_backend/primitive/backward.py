"""Backward passes: gradients of weights that wait, and losses that join.

Zero-bubble pipelines (Qi et al., arXiv 2401.10241) compute the gradient of a product's input first, which the stage
before waits for. A product that takes part saves its input and the gradient of its output, and nothing is computed twice.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class WeightGradients(list[tuple[Tensor, Callable[[], Tensor]]]):
    """Weights whose gradients a backward pass has put off, and what computes each gradient."""

    def compute(self) -> None:
        """Computes all of them, in the order of the backward pass, and adds them to the parameters' gradients."""
        for weight, compute in self:
            with torch.no_grad():
                gradient = compute()
            torch.autograd.backward([weight], [gradient])
        self.clear()


_open: list[WeightGradients] = []
"""Of the backward pass that runs now; no thread-local variable, because autograd has threads of its own for CUDA."""


@contextmanager
def put_off_weight_gradients() -> Generator[WeightGradients]:
    """Backward passes in this context compute no gradients of weights that can wait; they are in what it yields."""
    gradients = WeightGradients()
    _open.append(gradients)
    try:
        yield gradients
    finally:
        _open.pop()


def weight_gradient(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """What a backward function returns for ``weight``: ``compute()``, or None where it is put off.

    Args:
        weight: as the forward function got it; recomputation cuts the one in ``ctx.saved_tensors`` off from its parameter.
    """
    if not _open:
        return compute()
    _open[-1].append((weight, compute))
    return None


def put_off_in_linear_layers(module: nn.Module) -> None:
    """Lets the gradients of the weights of all ``nn.Linear`` in ``module`` be put off. Replaces their ``forward``."""
    for layer in module.modules():
        # Subclasses that compute something else are left alone.
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            setattr(layer, "forward", partial(_linear, layer))  # noqa: B010 - a method


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    product: Tensor = _Product.apply(x, layer.weight)
    return product if layer.bias is None else product + layer.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None
        return grad_x, weight_gradient(ctx.weight, lambda: grad.t() @ x) if needs_weight else None


def with_added_loss(output: Tensor, loss: Tensor) -> Tensor:
    """``output``, with which the gradient of ``loss``, 0-d, comes into the backward pass; no value that is seen changes."""
    added: Tensor = _WithLoss.apply(output, loss)
    return added


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        # Autograd would take the input itself for an output that was changed in place.
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=ctx.loss_dtype)
