"""Two sides compared, stage by stage, in the order in which a step computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rl_backend.parity.config import SideName
from rl_backend.parity.record import SideRecord
from rl_backend.parity.tolerances import Tolerances

type Stage = Literal["loaded weights", "activations", "log-probs", "loss", "gradient", "grad norm", "weights"]

GRADIENT_FLOOR = 1e-3
"""A gradient counts relative to its norm, but at least to this part of that of all gradients: the rest is rounding."""

UPDATE_FLOOR = 1e-3
"""A weight counts relative to its change in the step, but at least to this part of its size, which is rounded too."""


@dataclass(frozen=True)
class Difference:
    """One tensor or number of a stage.

    Attributes:
        relative: infinite where one side is not finite, has another shape or is missing.
        max_abs: largest difference of an element.
        missing_from: the side that does not have it; None when both do.
    """

    name: str
    relative: float
    max_abs: float
    missing_from: SideName | None = None


@dataclass(frozen=True)
class StageResult:
    """One stage of the first step.

    Attributes:
        compared: how many tensors or numbers.
        largest: the largest difference; None when nothing was compared.
        first_over: the first over the tolerance in the order of computation, or None.
        not_compared: names that one side does not have and need not have.
    """

    stage: Stage
    tolerance: float
    compared: int
    largest: Difference | None
    first_over: Difference | None
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepComparison:
    """Loss and gradient norm of one step, (reference, candidate), with relative differences and their tolerances."""

    step: int
    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    loss_difference: float
    grad_norm_difference: float
    loss_tolerance: float
    grad_norm_tolerance: float


@dataclass(frozen=True)
class Divergence:
    """Where two sides part: the first difference over its tolerance."""

    stage: Stage
    step: int
    difference: Difference
    tolerance: float

    def __str__(self) -> str:
        place = " ".join(part for part in (self.stage, self.difference.name) if part)
        if self.difference.missing_from is not None:
            return f"{place} (step {self.step}): the {self.difference.missing_from} does not have it"
        amount = f"relative difference {self.difference.relative:.1e} over the tolerance {self.tolerance:.0e}"
        return f"{place} (step {self.step}), {amount}"


@dataclass(frozen=True)
class Comparison:
    """All that was compared.

    Attributes:
        stages: of the first step, in order.
        steps: all steps.
        first_divergence: None when all differences are within their tolerances.
    """

    stages: tuple[StageResult, ...]
    steps: tuple[StepComparison, ...]
    first_divergence: Divergence | None

    @property
    def max_loss_difference(self) -> float:
        return max(step.loss_difference for step in self.steps)

    @property
    def max_grad_norm_difference(self) -> float:
        return max(step.grad_norm_difference for step in self.steps)

    @property
    def loss_fall(self) -> float:
        """By which part of itself the reference's loss fell."""
        first, last = self.steps[0].loss[0], self.steps[-1].loss[0]
        return (first - last) / first


def compare(reference: SideRecord, candidate: SideRecord, tolerances: Tolerances) -> Comparison:
    """Compares the first step stage by stage, then every step's loss and gradient norm."""
    steps = _steps(reference, candidate, tolerances)
    stages = (
        _weights_before(reference, candidate, tolerances.loaded_weights),
        _activations(reference, candidate, tolerances.activations),
        _result("log-probs", [tensor_difference("", reference.log_probs, candidate.log_probs)], tolerances.log_probs),
        _number("loss", steps[0].loss, steps[0].loss_difference, steps[0].loss_tolerance),
        _gradients(reference, candidate, tolerances.gradients),
        _number("grad norm", steps[0].grad_norm, steps[0].grad_norm_difference, steps[0].grad_norm_tolerance),
        _weights(reference, candidate, tolerances),
    )
    return Comparison(stages, steps, _first_divergence(stages, steps))


def number_difference(reference: float, candidate: float) -> float:
    """Relative to the reference; infinite when either is not finite."""
    if not (math.isfinite(reference) and math.isfinite(candidate)):
        return math.inf
    difference = abs(candidate - reference)
    return 0.0 if difference == 0 else difference / abs(reference) if reference else math.inf


def _steps(reference: SideRecord, candidate: SideRecord, tolerances: Tolerances) -> tuple[StepComparison, ...]:
    pairs = zip(reference.losses, candidate.losses, reference.grad_norms, candidate.grad_norms, strict=True)
    return tuple(
        StepComparison(
            step,
            (loss, other_loss),
            (norm, other_norm),
            number_difference(loss, other_loss),
            number_difference(norm, other_norm),
            *tolerances.at_step(step),
        )
        for step, (loss, other_loss, norm, other_norm) in enumerate(pairs)
    )


def _activations(reference: SideRecord, candidate: SideRecord, tolerance: float) -> StageResult:
    """Every side has its own inner modules, but the embedding, the layers and the last norm must be on both."""
    ours, theirs = reference.activations, candidate.activations
    everywhere = {**ours, **theirs}
    required = _top_level(everywhere) if ours and theirs else set(everywhere)
    one_sided = [path for path in everywhere if path not in ours or path not in theirs]
    optional = tuple(path for path in one_sided if path not in required)
    differences = [tensor_difference(path, ours.get(path), theirs.get(path)) for path in everywhere if path not in optional]
    return _result("activations", differences, tolerance, optional)


def _top_level(paths: Iterable[str]) -> set[str]:
    """The numbered layers, ``model.layers.0``, and what stands beside the list of them, as the embedding does."""
    split = {path: path.split(".") for path in paths}
    layers = {
        path for path, parts in split.items() if [part.isdigit() for part in parts].count(True) == 1 and parts[-1].isdigit()
    }
    lists = {path.rpartition(".")[0] for path in layers}
    parents = {path.rpartition(".")[0] for path in lists}
    return layers | {path for path in split if path.rpartition(".")[0] in parents and path not in lists}


def _gradients(reference: SideRecord, candidate: SideRecord, tolerance: float) -> StageResult:
    ours, theirs = reference.gradients, candidate.gradients
    least = GRADIENT_FLOOR * math.sqrt(sum(_norm(gradient) ** 2 for gradient in ours.values()))
    # Backward computes the last layer first.
    names = reversed(list({**theirs, **ours}))
    return _result(
        "gradient", [tensor_difference(name, ours.get(name), theirs.get(name), least) for name in names], tolerance
    )


def _weights(reference: SideRecord, candidate: SideRecord, tolerances: Tolerances) -> StageResult:
    """Leaves out elements whose gradient is not 0 but so small that its tolerance allows either sign: Adam's first step has
    one size whatever the gradient's."""
    differences = []
    for name in {**candidate.weights, **reference.weights}:
        ours, theirs = reference.weights.get(name), candidate.weights.get(name)
        before, gradient = reference.loaded_weights.get(name), reference.gradients.get(name)
        if ours is not None and theirs is not None and before is not None and ours.shape == theirs.shape == before.shape:
            if gradient is not None and gradient.shape == ours.shape:
                size = gradient.abs()
                clear = (size == 0) | (size > tolerances.gradients * size.square().mean().sqrt())
                ours, theirs, before = ours[clear], theirs[clear], before[clear]
            scale = max(_norm(ours.double() - before.double()), UPDATE_FLOOR * _norm(ours))
            differences.append(_difference(name, ours, theirs, scale))
        else:
            differences.append(tensor_difference(name, ours, theirs))
    return _result("weights", differences, tolerances.weights)


def _weights_before(reference: SideRecord, candidate: SideRecord, tolerance: float) -> StageResult:
    ours, theirs = reference.loaded_weights, candidate.loaded_weights
    differences = [tensor_difference(name, ours.get(name), theirs.get(name)) for name in {**theirs, **ours}]
    return _result("loaded weights", differences, tolerance)


def _number(stage: Stage, values: tuple[float, float], relative: float, tolerance: float) -> StageResult:
    return _result(stage, [Difference("", relative, abs(values[1] - values[0]))], tolerance)


def _result(
    stage: Stage, differences: Sequence[Difference], tolerance: float, not_compared: tuple[str, ...] = ()
) -> StageResult:
    return StageResult(
        stage=stage,
        tolerance=tolerance,
        compared=sum(difference.missing_from is None for difference in differences),
        largest=max(differences, key=lambda difference: difference.relative, default=None),
        first_over=next((difference for difference in differences if difference.relative > tolerance), None),
        not_compared=not_compared,
    )


def _first_divergence(stages: Sequence[StageResult], steps: Sequence[StepComparison]) -> Divergence | None:
    for result in stages:
        if result.first_over is not None:
            return Divergence(result.stage, 0, result.first_over, result.tolerance)
    for step in steps[1:]:
        numbers: tuple[tuple[Stage, tuple[float, float], float, float], ...] = (
            ("loss", step.loss, step.loss_difference, step.loss_tolerance),
            ("grad norm", step.grad_norm, step.grad_norm_difference, step.grad_norm_tolerance),
        )
        for stage, (ours, theirs), difference, tolerance in numbers:
            if difference > tolerance:
                return Divergence(stage, step.step, Difference("", difference, abs(theirs - ours)), tolerance)
    return None


def tensor_difference(name: str, reference: Tensor | None, candidate: Tensor | None, least_scale: float = 0.0) -> Difference:
    """2-norm of the difference relative to that of the reference, or to ``least_scale`` if that is more."""
    if reference is None or candidate is None:
        return Difference(name, math.inf, math.inf, "reference" if reference is None else "candidate")
    if reference.shape != candidate.shape:
        return Difference(name, math.inf, math.inf)
    return _difference(name, reference, candidate, max(_norm(reference), least_scale))


def _difference(name: str, reference: Tensor, candidate: Tensor, scale: float) -> Difference:
    difference = candidate.double() - reference.double()
    norm, largest = _norm(difference), float(difference.abs().max()) if difference.numel() else 0.0
    if not math.isfinite(norm):
        return Difference(name, math.inf, math.inf)
    return Difference(name, 0.0 if norm == 0 else norm / scale if scale else math.inf, largest)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())
