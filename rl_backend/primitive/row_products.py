"""The check that rows of matrix products do not depend on others, which adapters beside each other rely on."""

import logging
from functools import lru_cache

import torch
from torch import Tensor

from rl_backend.primitive.adapted_linear import ENOUGH_ROWS, padded_product

logger = logging.getLogger(__name__)

_STACKED = 10
_ROWS = _STACKED * ENOUGH_ROWS
_FEATURES = ((64, 16), (128, 192), (512, 64))
_RUNS = ((0, 3), (5, 21), (33, _ROWS))


def rows_are_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether some rows give the same bits alone as beside others, in the products of a linear layer and of an adapter.

    Holds for what was tried alone, so False on a GPU, whose library chooses kernels by the number of rows. Some
    milliseconds once for each process, dtype, device and number of threads. A failure is logged.
    """
    return device.type == "cpu" and _tried(dtype, torch.get_num_threads())


@lru_cache
def _tried(dtype: torch.dtype, num_threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in _FEATURES:
        shapes = (_ROWS, inputs), (outputs, inputs), (_ROWS, outputs)
        x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        exact = all(_is_exact(x, weight, grad, slice(*run)) for run in _RUNS)
        if not (exact and _stacks_are_exact(x, weight, grad)):
            logger.warning(
                "rows of products of %s matrices on this CPU depend on others (%d threads): LoRA tenants' updates are the "
                "same alone and beside others to rounding, not to the last bit",
                dtype,
                num_threads,
            )
            return False
    return True


def _is_exact(x: Tensor, weight: Tensor, grad: Tensor, run: slice) -> bool:
    own_x, own_grad = x[run].clone(), grad[run].clone()
    return (
        torch.equal(padded_product(own_x, weight.t()), padded_product(x, weight.t())[run])
        and torch.equal(padded_product(own_grad, weight), padded_product(grad, weight)[run])
        and torch.equal(own_grad.t() @ own_x, grad[run].t() @ x[run])
    )


def _stacks_are_exact(x: Tensor, weight: Tensor, grad: Tensor) -> bool:
    """Whether matrices give in one product of stacks what each gives alone."""
    xs, grads = (each.view(_STACKED, ENOUGH_ROWS, -1) for each in (x, grad))
    weights = torch.stack([weight.roll(index, 0) for index in range(_STACKED)])
    return all(
        torch.equal(torch.bmm(a, b), torch.cat([torch.bmm(*pair) for pair in zip(a.split(1), b.split(1), strict=True)]))
        for a, b in ((xs, weights.mT), (grads, weights), (grads.mT, xs))
    )
