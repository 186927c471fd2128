"""Differences of two tensors or numbers, and the tolerances for them."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from torch import Tensor

from rl_backend.lab.parity.config import DType, SideName

type Measure = Literal["relative difference", "common factor"]

COMMON_FACTOR_SHARE = 0.05
"""Part of an activation's tolerance that a factor common to all its elements may use up."""

_BASE_STEPS = 5


class Tolerances(NamedTuple):
    """Relative differences that count as rounding, for learning rates from 1e-5 to 1e-4.

    Attributes:
        loaded_weights, activations, log_probs, gradients, weights: of tensors in the first step, in the 2-norm.
        loss, grad_norm: over the first 5 steps; ten times as much over the first 20, and again for every four times as
            many: each step starts from the rounding of the one before, and differences grow with the steps and the
            learning rate.
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


@dataclass(frozen=True)
class Difference:
    """One tensor or number, compared.

    Attributes:
        name: empty where a stage has one.
        amount: infinite where one side is not finite, has another shape or is missing.
        tolerance: what it may be.
        max_abs_difference: largest difference of an element.
        measure: what ``amount`` is: the 2-norm of the difference relative to the reference (or to a larger scale that the
            stage sets), or by how much all elements are larger or smaller together.
        missing_from: the side that does not have it; None when both do, ``both`` when there is nothing to compare.
    """

    name: str
    amount: float
    tolerance: float
    max_abs_difference: float
    measure: Measure = "relative difference"
    missing_from: SideName | Literal["both"] | None = None

    @property
    def over(self) -> bool:
        return self.amount > self.tolerance

    @property
    def excess(self) -> float:
        """In units of the tolerance."""
        return self.amount / self.tolerance if self.tolerance else math.inf if self.amount else 0.0

    def __str__(self) -> str:
        if self.missing_from == "both":
            return "nothing to compare: neither side has it"
        if self.missing_from is not None:
            return f"the {self.missing_from} does not have it"
        if not math.isfinite(self.amount):
            return "one side has another shape or values that are not finite"
        return f"{self.measure} {self.amount:.1e} over the tolerance {self.tolerance:.0e}"


def number_difference(reference: float, candidate: float, tolerance: float) -> Difference:
    """Relative to the reference."""
    difference = abs(candidate - reference)
    largest = difference if math.isfinite(difference) else math.inf
    return Difference("", _ratio(difference, abs(reference)), tolerance, largest)


def tensor_difference(
    name: str, reference: Tensor | None, candidate: Tensor | None, tolerance: float, least_scale: float = 0.0
) -> Difference:
    """In the 2-norm, relative to that of the reference, or to ``least_scale`` if that is more.

    What neither side has, or has no elements, is over any tolerance.
    """
    if not any(tensor is not None and tensor.numel() for tensor in (reference, candidate)):
        return Difference(name, math.inf, tolerance, math.inf, missing_from="both")
    if reference is None or candidate is None:
        missing_from: SideName = "reference" if reference is None else "candidate"
        return Difference(name, math.inf, tolerance, math.inf, missing_from=missing_from)
    if reference.shape != candidate.shape:
        return Difference(name, math.inf, tolerance, math.inf)
    difference = candidate.double() - reference.double()
    norm = two_norm(difference)
    largest = float(difference.abs().max()) if difference.numel() and math.isfinite(norm) else norm
    return Difference(name, _ratio(norm, max(two_norm(reference), least_scale)), tolerance, largest)


def activation_difference(name: str, reference: Tensor | None, candidate: Tensor | None, tolerance: float) -> Difference:
    """The norm of the difference, or the factor that all elements share, whichever uses up more of its tolerance.

    Rounding of thousands of elements averages out in the factor. It shows what the norm does not, for example a slightly
    different eps of a norm layer.
    """
    whole = tensor_difference(name, reference, candidate, tolerance)
    if reference is None or candidate is None or not math.isfinite(whole.amount):
        return whole
    ours = reference.double()
    factor = abs(float(((candidate.double() - ours) * ours).sum()))
    shared = Difference(
        name, _ratio(factor, two_norm(ours) ** 2), COMMON_FACTOR_SHARE * tolerance, whole.max_abs_difference, "common factor"
    )
    return shared if shared.excess > whole.excess else whole


def two_norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _ratio(difference: float, scale: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(scale)):
        return math.inf
    return 0.0 if difference == 0 else difference / scale if scale else math.inf
