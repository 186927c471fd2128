"""Records of two sides, compared stage by stage in the order in which a step computes."""

import importlib.metadata
import math
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from rl_backend.contracts import RLBackendError
from rl_backend.data import MicroBatchPlan, restore_order
from rl_backend.lab.parity.config import DType, SideName

type NamedTensors = Mapping[str, Tensor]

PACKAGES = ("torch", "transformers", "megatron-core", "megatron-bridge", "transformer-engine")


@dataclass(frozen=True, eq=False, repr=False)
class RankRecord:
    """What one rank of a side saw.

    Attributes:
        data_parallel_rank: whose share of the batch it had.
        is_source: whether it has outputs.
        activations: per sequence of the share, Hugging Face module path -> (L, hidden_size).
        log_probs: per sequence of the share, (L,).
        losses: this data-parallel rank's loss in each step.
        grad_norms: in each step.
        loaded_weights, gradients, weights: before training, in the first step and after it, float32 under their Hugging
            Face names; on rank 0 only.
        versions: of the packages that computed.
    """

    data_parallel_rank: int
    is_source: bool
    activations: Sequence[NamedTensors]
    log_probs: Sequence[Tensor]
    losses: Sequence[float]
    grad_norms: Sequence[float]
    loaded_weights: NamedTensors = field(default_factory=dict)
    gradients: NamedTensors = field(default_factory=dict)
    weights: NamedTensors = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        # The tensors stay in the file until they are used.
        return cls(**torch.load(path, mmap=True, weights_only=True))


@dataclass(frozen=True, eq=False, repr=False)
class SideRecord:
    """What one side computed, independent of its layout: T tokens are those of all sequences in their order.

    Attributes:
        activations: Hugging Face module path -> (T, hidden_size) in the first step, in order of computation.
        log_probs: (T,) in the first step.
        losses, grad_norms: of each step.
        loaded_weights, gradients, weights, versions: as in :class:`RankRecord`.
    """

    activations: NamedTensors
    log_probs: Tensor
    losses: Sequence[float]
    grad_norms: Sequence[float]
    loaded_weights: NamedTensors
    gradients: NamedTensors
    weights: NamedTensors
    versions: Mapping[str, str] = field(default_factory=dict)


class StepNumbers(NamedTuple):
    """Of each step."""

    losses: Sequence[float]
    grad_norms: Sequence[float]


def merge_steps(ranks: Sequence[RankRecord], dp_size: int) -> StepNumbers:
    """Of all ranks of a side; refuses ranks whose gradient norms are not the same."""
    sources = {rank.data_parallel_rank: rank for rank in ranks if rank.is_source}
    for index, rank in enumerate(ranks):
        for step, (norm, first) in enumerate(zip(rank.grad_norms, ranks[0].grad_norms, strict=True)):
            both_nan = math.isnan(norm) and math.isnan(first)
            if not both_nan and not math.isclose(norm, first, rel_tol=1e-6):
                raise RLBackendError(
                    f"rank {index} has gradient norm {norm} in step {step} and rank 0 has {first}; it must be the same",
                    rank=index,
                    step=step,
                )
    shares = [sources[index].losses for index in range(dp_size)]
    return StepNumbers([sum(losses) / dp_size for losses in zip(*shares, strict=True)], ranks[0].grad_norms)


def merge_ranks(ranks: Sequence[RankRecord], plan: MicroBatchPlan) -> SideRecord:
    """One side out of its ranks; see :func:`merge_steps`."""
    steps = merge_steps(ranks, plan.dp_size)
    sources = {rank.data_parallel_rank: rank for rank in ranks if rank.is_source}
    shares = [sources[index] for index in range(plan.dp_size)]
    activations = restore_order(plan, [share.activations for share in shares])
    everywhere = [path for path in activations[0] if all(path in one for one in activations)]
    of_rank_0 = ("loaded_weights", "gradients", "weights", "versions")
    return SideRecord(
        activations={path: torch.cat([one[path] for one in activations]) for path in everywhere},
        log_probs=torch.cat(restore_order(plan, [share.log_probs for share in shares])),
        losses=steps.losses,
        grad_norms=steps.grad_norms,
        **{name: getattr(ranks[0], name) for name in of_rank_0},
    )


def package_versions() -> dict[str, str]:
    """Versions of those that this process has imported."""
    imported = [name for name in PACKAGES if sys.modules.keys() & {name.replace("-", "_"), name.replace("-", ".")}]
    versions = {"python": platform.python_version()}
    for package in imported:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


type Measure = Literal["relative difference", "common factor"]

# Part of an activation's tolerance that a factor common to all its elements may use up. Rounding of thousands of elements
# averages out in the factor, which shows what the norm does not, such as a slightly different eps of a norm layer.
COMMON_FACTOR_SHARE = 0.05

_BASE_STEPS = 5
# What a running comparison may be, as a multiple of how far the reference is from itself in another order.
FLOORS = 3.0


class Tolerances(NamedTuple):
    """Relative differences that count as rounding.

    Attributes:
        loaded_weights, activations, log_probs, gradients, weights: of tensors in the first step, in the 2-norm.
        loss, grad_norm: over the first 5 steps; ten times as much over the first 20, and again for every four times as
            many: each step starts from the rounding of the one before, and differences grow with the steps and the
            learning rate. Where the reference is further than that from itself, :data:`FLOORS` times as far.
        loss_alone, grad_norm_alone: of a step that starts from the same weights.
    """

    loaded_weights: float
    activations: float
    log_probs: float
    gradients: float
    weights: float
    loss: float
    grad_norm: float
    loss_alone: float
    grad_norm_alone: float

    @classmethod
    def of(cls, dtype: DType, factor: float = 1.0) -> Self:
        """Those of a dtype, all multiplied by ``factor`` but that of the loaded weights."""
        base = _DEFAULTS[dtype]
        return cls(base[0], *(value * factor for value in base[1:]))

    def at_step(self, step: int) -> tuple[float, float]:
        """Tolerances of the loss and the gradient norm of a step, counted from 0."""
        growth = 10.0 ** max(0, math.ceil(math.log((step + 1) / _BASE_STEPS, 4) - 1e-9))
        return self.loss * growth, self.grad_norm * growth


_DEFAULTS: dict[DType, tuple[float, float, float, float, float, float, float, float, float]] = {
    "float32": (0.0, 1e-5, 1e-5, 1e-4, 5e-4, 1e-6, 1e-5, 1e-5, 1e-3),
    "bfloat16": (4e-3, 5e-2, 2e-2, 2e-1, 2e-1, 2e-3, 1e-2, 2e-2, 1e-1),
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
    """The norm of the difference, or the factor that all elements share, whichever uses up more of its tolerance."""
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


type Stage = Literal["loaded weights", "activations", "log-probs", "loss", "gradient", "grad norm", "weights"]

_NUMBERS: tuple[Stage, Stage] = ("loss", "grad norm")

# A gradient counts relative to its norm, but at least to this part of that of all gradients: the rest is rounding.
GRADIENT_FLOOR = 1e-3
# A weight counts relative to its change in the step, but at least to this part of its size, which is rounded too.
UPDATE_FLOOR = 1e-3
# By how many tolerances, and by no more than which part of itself, a module's output must differ to count as taken at
# another place of the same computation: with all that follows the same, so large a difference is none of what is computed.
ENDS_ELSEWHERE = 100.0
MOST_OF_AN_OUTPUT = 0.5


@dataclass(frozen=True)
class StageResult:
    """One stage of the first step.

    Attributes:
        compared: how many tensors or numbers.
        largest: the difference that uses up most of its tolerance.
        first_over: the first over its tolerance in the order of computation, or None.
        not_compared: names that one side does not have and need not have.
        ends_elsewhere: modules whose outputs differ, though what follows does not: one side scales, normalises or adds a
            bias inside of the module and the other after it. They count in nothing else.
    """

    stage: Stage
    compared: int
    largest: Difference
    first_over: Difference | None
    not_compared: tuple[str, ...] = ()
    ends_elsewhere: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class StepComparison:
    """Loss and gradient norm of one step, (reference, candidate), and their differences.

    Attributes:
        floor: differences of the reference from itself in another order, or None.
        alone: those of the candidate when this step starts from the reference's weights, or None; in the first they do.
    """

    step: int
    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    loss_difference: Difference
    grad_norm_difference: Difference
    floor: tuple[Difference, Difference] | None = None
    alone: tuple[Difference, Difference] | None = None


@dataclass(frozen=True)
class Divergence:
    """Where two sides part: the first difference over its tolerance."""

    stage: Stage
    step: int
    difference: Difference
    alone: bool = False

    def __str__(self) -> str:
        place = " ".join(part for part in (self.stage, self.difference.name) if part)
        return f"{place} (step {self.step}{' alone' if self.alone else ''}): {self.difference}"


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
        return max(step.loss_difference.amount for step in self.steps)

    @property
    def max_grad_norm_difference(self) -> float:
        return max(step.grad_norm_difference.amount for step in self.steps)

    @property
    def largest_floor(self) -> tuple[float, float] | None:
        """Largest difference of the reference from itself, of the loss and of the gradient norm."""
        return _largest([step.floor for step in self.steps])

    @property
    def largest_alone(self) -> tuple[float, float] | None:
        """The same of the steps that start from the reference's weights."""
        return _largest([step.alone for step in self.steps])

    @property
    def loss_fall(self) -> float:
        """By which part of itself the reference's loss fell."""
        first, last = self.steps[0].loss[0], self.steps[-1].loss[0]
        return (first - last) / first


def _largest(pairs: Sequence[tuple[Difference, Difference] | None]) -> tuple[float, float] | None:
    found = [pair for pair in pairs if pair is not None]
    return (max(loss.amount for loss, _ in found), max(norm.amount for _, norm in found)) if found else None


def compare(
    reference: SideRecord,
    candidate: SideRecord,
    tolerances: Tolerances,
    required_modules: Collection[str],
    again: StepNumbers | None = None,
    alone: StepNumbers | None = None,
) -> Comparison:
    """Compares the first step stage by stage, then every step's loss and gradient norm.

    Args:
        required_modules: paths of the modules whose activations both sides must have; each side may have more.
        again: steps of the reference in an order that changes only rounding.
        alone: steps of the candidate but the first, each from the weights that the reference had in ``again``.
    """
    steps = _steps(reference, candidate, tolerances, again, alone)
    loaded = _tensors(reference.loaded_weights, candidate.loaded_weights, tolerances.loaded_weights)
    log_probs = tensor_difference("", reference.log_probs, candidate.log_probs, tolerances.log_probs)
    floor = GRADIENT_FLOOR * math.sqrt(sum(two_norm(gradient) ** 2 for gradient in reference.gradients.values()))
    # Backward computes the last layer first.
    gradients = _tensors(reference.gradients, candidate.gradients, tolerances.gradients, floor)[::-1]
    names = {**candidate.weights, **reference.weights}
    weights = [_weight(name, reference, candidate, tolerances, floor) for name in names]
    results = [log_probs, steps[0].loss_difference, steps[0].grad_norm_difference, *gradients]
    same_results = not any(difference.over for difference in results)
    stages = (
        _result("loaded weights", tolerances.loaded_weights, loaded),
        _activations(reference, candidate, tolerances.activations, required_modules, same_results=same_results),
        _result("log-probs", tolerances.log_probs, [log_probs]),
        _result("loss", tolerances.loss, [steps[0].loss_difference]),
        _result("gradient", tolerances.gradients, gradients),
        _result("grad norm", tolerances.grad_norm, [steps[0].grad_norm_difference]),
        _result("weights", tolerances.weights, weights),
    )
    return Comparison(stages, steps, _first_divergence(stages, steps))


def _steps(
    reference: SideRecord,
    candidate: SideRecord,
    tolerances: Tolerances,
    again: StepNumbers | None,
    alone: StepNumbers | None,
) -> tuple[StepComparison, ...]:
    steps = []
    losses = zip(reference.losses, candidate.losses, strict=True)
    norms = zip(reference.grad_norms, candidate.grad_norms, strict=True)
    loss_floor = norm_floor = 0.0
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        loss_tolerance, norm_tolerance = tolerances.at_step(step)
        floor = by_itself = None
        if again is not None:
            of_loss = number_difference(loss[0], again.losses[step], math.inf)
            of_norm = number_difference(norm[0], again.grad_norms[step], math.inf)
            floor = of_loss, of_norm
        if floor is not None and step:
            # What a step starts from is no nearer than the steps before it were; the first starts from the same.
            loss_floor, norm_floor = max(loss_floor, of_loss.amount), max(norm_floor, of_norm.amount)
            loss_tolerance = max(loss_tolerance, FLOORS * loss_floor)
            norm_tolerance = max(norm_tolerance, FLOORS * norm_floor)
        if again is not None and alone is not None and step:
            by_itself = (
                number_difference(again.losses[step], alone.losses[step - 1], tolerances.loss_alone),
                number_difference(again.grad_norms[step], alone.grad_norms[step - 1], tolerances.grad_norm_alone),
            )
        differences = number_difference(*loss, loss_tolerance), number_difference(*norm, norm_tolerance)
        steps.append(StepComparison(step, loss, norm, *differences, floor, by_itself))
    return tuple(steps)


def _activations(
    reference: SideRecord, candidate: SideRecord, tolerance: float, required: Collection[str], *, same_results: bool
) -> StageResult:
    ours, theirs = reference.activations, candidate.activations
    everywhere = list(dict.fromkeys([*ours, *theirs, *required]))
    one_sided = [path for path in everywhere if path not in ours or path not in theirs]
    optional = tuple(path for path in one_sided if path not in required)
    compared = [path for path in everywhere if path not in optional]
    differences = [activation_difference(path, ours.get(path), theirs.get(path), tolerance) for path in compared]
    elsewhere = _ending_elsewhere(differences, tolerance, required) if same_results else ()
    differences = [difference for difference in differences if difference not in elsewhere]
    return _result("activations", tolerance, differences, optional, elsewhere)


def _ending_elsewhere(
    differences: Sequence[Difference], tolerance: float, required: Collection[str]
) -> tuple[Difference, ...]:
    """Of differences in the order of computation, those that the next of the required modules does not have any more."""
    found = []
    next_agrees, least = True, min(ENDS_ELSEWHERE * tolerance, MOST_OF_AN_OUTPUT)
    for difference in reversed(differences):
        comparable = difference.missing_from is None and math.isfinite(difference.amount)
        if difference.over and next_agrees and comparable and difference.amount > least:
            found.append(difference)
        if difference.name in required:
            next_agrees = not difference.over
    return tuple(reversed(found))


def _tensors(
    reference: NamedTensors, candidate: NamedTensors, tolerance: float, least_scale: float = 0.0
) -> list[Difference]:
    names = {**candidate, **reference}
    return [tensor_difference(name, reference.get(name), candidate.get(name), tolerance, least_scale) for name in names]


def _weight(
    name: str, reference: SideRecord, candidate: SideRecord, tolerances: Tolerances, least_gradient: float
) -> Difference:
    ours, theirs = reference.weights.get(name), candidate.weights.get(name)
    before, gradient = reference.loaded_weights.get(name), reference.gradients.get(name)
    if ours is None or theirs is None or before is None or not ours.shape == theirs.shape == before.shape:
        return tensor_difference(name, ours, theirs, tolerances.weights)
    # Leaves out elements whose gradient is so small that its tolerance allows either sign: Adam's first step has one size
    # whatever the gradient's. Where none is left, the weight must be finite.
    if gradient is not None and gradient.shape == ours.shape:
        size = gradient.abs()
        scale = max(two_norm(gradient), least_gradient) / math.sqrt(max(1, gradient.numel()))
        others = candidate.gradients.get(name)
        # Rounding may cancel to 0 on one side; what no token reaches is 0 on both.
        unreached = (size == 0) & (others == 0 if others is not None and others.shape == size.shape else True)
        clear = unreached | (size > tolerances.gradients * scale)
        if not bool(clear.any()) and gradient.numel() and math.isfinite(two_norm(theirs)):
            return Difference(name, 0.0, tolerances.weights, float((theirs - ours).abs().max()))
        ours, theirs, before = ours[clear], theirs[clear], before[clear]
    change = ours.double() - before.double()
    scale = max(two_norm(change), UPDATE_FLOOR * two_norm(ours))
    # Weights minus their values before the step: the difference is relative to the change.
    return tensor_difference(name, change, theirs.double() - before.double(), tolerances.weights, scale)


def _result(
    stage: Stage,
    tolerance: float,
    differences: Sequence[Difference],
    not_compared: tuple[str, ...] = (),
    ends_elsewhere: tuple[Difference, ...] = (),
) -> StageResult:
    differences = differences or [tensor_difference("", None, None, tolerance)]
    return StageResult(
        stage=stage,
        compared=sum(difference.missing_from is None for difference in differences),
        largest=max(differences, key=lambda difference: difference.excess),
        first_over=next((difference for difference in differences if difference.over), None),
        not_compared=not_compared,
        ends_elsewhere=ends_elsewhere,
    )


def _first_divergence(stages: Sequence[StageResult], steps: Sequence[StepComparison]) -> Divergence | None:
    for result in stages:
        if result.first_over is not None:
            return Divergence(result.stage, 0, result.first_over)
    for step in steps[1:]:
        running = (step.loss_difference, step.grad_norm_difference)
        for differences, alone in ((step.alone or (), True), (running, False)):
            for stage, difference in zip(_NUMBERS, differences, strict=False):
                if difference.over:
                    return Divergence(stage, step.step, difference, alone)
    return None
