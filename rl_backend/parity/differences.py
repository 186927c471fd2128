"""How far two tensors or numbers are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rl_backend.parity.config import SideName

type Measure = Literal["relative difference", "common factor"]

COMMON_FACTOR_SHARE = 0.05
"""Part of an activation's tolerance that a factor common to all its elements may use up."""


@dataclass(frozen=True)
class Difference:
    """One tensor or number, compared.

    Attributes:
        name: empty where a stage has one.
        amount: infinite where one side is not finite, has another shape or is missing.
        tolerance: what it may be.
        max_abs: largest difference of an element.
        measure: what ``amount`` is: the 2-norm of the difference relative to the reference (or to a larger scale that the
            stage sets), or by how much all elements are larger or smaller together.
        missing_from: the side that does not have it; None when both do, ``both`` when there is nothing to compare.
    """

    name: str
    amount: float
    tolerance: float
    max_abs: float
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


def nothing_to_compare(name: str, tolerance: float) -> Difference:
    """What neither side has: over any tolerance."""
    return Difference(name, math.inf, tolerance, math.inf, missing_from="both")


def number_difference(name: str, reference: float, candidate: float, tolerance: float) -> Difference:
    """Relative to the reference."""
    difference = abs(candidate - reference)
    return Difference(
        name, _ratio(difference, abs(reference)), tolerance, difference if math.isfinite(difference) else math.inf
    )


def tensor_difference(
    name: str, reference: Tensor | None, candidate: Tensor | None, tolerance: float, least_scale: float = 0.0
) -> Difference:
    """In the 2-norm, relative to that of the reference, or to ``least_scale`` if that is more."""
    if not any(tensor is not None and tensor.numel() for tensor in (reference, candidate)):
        return nothing_to_compare(name, tolerance)
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

    Rounding of thousands of elements averages out in the factor, so it shows what the norm does not, like a slightly other
    eps of a norm.
    """
    whole = tensor_difference(name, reference, candidate, tolerance)
    if reference is None or candidate is None or not math.isfinite(whole.amount):
        return whole
    ours = reference.double()
    factor = abs(float(((candidate.double() - ours) * ours).sum()))
    shared = Difference(
        name, _ratio(factor, two_norm(ours) ** 2), COMMON_FACTOR_SHARE * tolerance, whole.max_abs, "common factor"
    )
    return shared if shared.excess > whole.excess else whole


def two_norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _ratio(difference: float, scale: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(scale)):
        return math.inf
    return 0.0 if difference == 0 else difference / scale if scale else math.inf
