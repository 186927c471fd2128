"""How far two sides may be apart."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from rl_backend.parity.config import DType

_BASE_STEPS = 5


class Tolerances(NamedTuple):
    """Relative differences that count as rounding, for learning rates from 1e-5 to 1e-4.

    Attributes:
        loaded_weights, activations, log_probs, gradients, weights: of tensors in the first step, in the 2-norm.
        loss, grad_norm: over the first 5 steps; ten times as much over the first 20, and again for every four times as
            many: what rounding does to one step is the start of the next, so that differences grow with the steps, and with
            the learning rate.
    """

    loaded_weights: float
    activations: float
    log_probs: float
    gradients: float
    weights: float
    loss: float
    grad_norm: float

    @classmethod
    def of(cls, dtype: DType, factor: float = 1.0) -> Self:
        """Those of a dtype, all multiplied by ``factor`` but that of the loaded weights."""
        base = _DEFAULTS[dtype]
        return cls(base[0], *(value * factor for value in base[1:]))

    def at_step(self, step: int) -> tuple[float, float]:
        """Tolerances of the loss and the gradient norm of a step, counted from 0."""
        growth = 10.0 ** max(0, math.ceil(math.log((step + 1) / _BASE_STEPS, 4) - 1e-9))
        return self.loss * growth, self.grad_norm * growth


_DEFAULTS: dict[DType, tuple[float, float, float, float, float, float, float]] = {
    "float32": (0.0, 1e-5, 1e-5, 1e-4, 5e-4, 1e-6, 1e-5),
    "bfloat16": (4e-3, 5e-2, 2e-2, 2e-1, 2e-1, 2e-3, 1e-2),
}
