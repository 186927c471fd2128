"""A result as text for a person and as JSON for a program."""

from __future__ import annotations

import math
from typing import Any

from rl_backend.parity.compare import Divergence, StageResult, StepComparison
from rl_backend.parity.config import ParitySide
from rl_backend.parity.differences import Difference
from rl_backend.parity.run import SIDES, ParityResult

LEAST_LR = 1e-5
"""Below it, the weights' tolerance hides what weight decay changes in a step."""

LEAST_LOSS_FALL = 0.05
"""Part of itself by which the loss must fall for the later steps to say much."""


def as_text(result: ParityResult) -> str:
    """Tables of stages and steps, then the verdict."""
    config, comparison = result.config, result.comparison
    lines = [
        f"{config.model}: {config.dtype} on {result.device}, lr {config.lr:g}, {config.num_sequences} sequences of "
        f"{result.num_tokens} tokens in {config.num_micro_batches} micro-batches for each data-parallel rank"
    ]
    lines += [f"  {name:9}  {_describe(config.side(name))}" for name in SIDES]
    lines += ["", f"  {'step 0':14}  {'compared':>8}  {'difference':>10}  {'tolerance':>9}  largest in"]
    lines += [_stage_line(stage) for stage in comparison.stages]
    activations = next(stage for stage in comparison.stages if stage.stage == "activations")
    if activations.not_compared:
        lines.append(f"  not compared, on one side only: {_shortened(activations.not_compared)}")
    lines += [
        "",
        f"  {'step':>4}  {'loss':>11}  {'candidate':>11}  {'difference':>10}  "
        f"{'grad norm':>11}  {'candidate':>11}  {'difference':>10}",
    ]
    lines += [_step_line(step) for step in comparison.steps]
    lines += [
        "",
        f"largest difference of the loss {comparison.max_loss_difference:.1e}, of the gradient norm "
        f"{comparison.max_grad_norm_difference:.1e}; the loss fell by {comparison.loss_fall:.1%}",
    ]
    if not comparison.loss_fall >= LEAST_LOSS_FALL:
        lines.append(
            f"that is less than {LEAST_LOSS_FALL:.0%}, so the later steps say little: take more steps or a larger lr"
        )
    if config.lr < LEAST_LR:
        lines.append(f"with lr below {LEAST_LR:.0e}, the weights' tolerance may hide a parameter in a wrong decay group")
    divergence = comparison.first_divergence
    lines.append("no divergence: all within the tolerances" if divergence is None else f"first divergence: {divergence}")
    return "\n".join(lines)


def as_json(result: ParityResult) -> dict[str, Any]:
    """What ``--json`` writes. Differences that are not finite are null."""
    config, comparison = result.config, result.comparison
    return {
        "model": config.model,
        "dtype": config.dtype,
        "device": result.device,
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "seed": config.seed,
        "num_sequences": config.num_sequences,
        "num_tokens": result.num_tokens,
        "num_micro_batches": config.num_micro_batches,
        **{name: {**_side(config.side(name)), "versions": result.versions[name]} for name in SIDES},
        "max_loss_rel_diff": _finite(comparison.max_loss_difference),
        "max_grad_norm_rel_diff": _finite(comparison.max_grad_norm_difference),
        "loss_fall": _finite(comparison.loss_fall),
        "first_divergence": _divergence(comparison.first_divergence),
        "stages": [_stage(stage) for stage in comparison.stages],
        "steps": [_step(step) for step in comparison.steps],
    }


def _describe(side: ParitySide) -> str:
    ranks = "1 rank" if side.world_size == 1 else f"{side.world_size} ranks"
    return " ".join(part for part in (side.runtime, side.layout, f"({ranks})") if part)


def _stage_line(stage: StageResult) -> str:
    largest = stage.largest
    start = f"  {stage.stage:14}  {stage.compared:8}"
    amount = "missing" if largest.missing_from is not None else f"{largest.amount:.1e}"
    remarks = [
        largest.name,
        f"({largest})" if largest.missing_from is not None else "",
        f"({largest.measure})" if largest.measure != "relative difference" else "",
        "" if stage.first_over is None else "<- over",
    ]
    return f"{start}  {amount:>10}  {largest.tolerance:9.0e}  {' '.join(filter(None, remarks))}".rstrip()


def _step_line(step: StepComparison) -> str:
    over = [
        name
        for name, difference in (("loss", step.loss_difference), ("grad norm", step.grad_norm_difference))
        if difference.over
    ]
    numbers = [
        f"{values[0]:11.6f}  {values[1]:11.6f}  {difference.amount:10.1e}"
        for values, difference in ((step.loss, step.loss_difference), (step.grad_norm, step.grad_norm_difference))
    ]
    return f"  {step.step:4}  {'  '.join(numbers)}" + (f"  <- {' and '.join(over)} over" if over else "")


def _shortened(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _side(side: ParitySide) -> dict[str, Any]:
    return {
        "runtime": side.runtime,
        "world_size": side.world_size,
        "layout": {**side.parallel.model_dump(), "dp": side.data_parallel_size},
        "options": side.options,
    }


def _stage(stage: StageResult) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "compared": stage.compared,
        "largest": _difference(stage.largest),
        "first_over": None if stage.first_over is None else _difference(stage.first_over),
        "not_compared": list(stage.not_compared),
    }


def _step(step: StepComparison) -> dict[str, Any]:
    return {
        "step": step.step,
        "reference": {"loss": _finite(step.loss[0]), "grad_norm": _finite(step.grad_norm[0])},
        "candidate": {"loss": _finite(step.loss[1]), "grad_norm": _finite(step.grad_norm[1])},
        "loss_rel_diff": _finite(step.loss_difference.amount),
        "grad_norm_rel_diff": _finite(step.grad_norm_difference.amount),
        "loss_tolerance": step.loss_difference.tolerance,
        "grad_norm_tolerance": step.grad_norm_difference.tolerance,
    }


def _divergence(divergence: Divergence | None) -> dict[str, Any] | None:
    if divergence is None:
        return None
    place = {"stage": divergence.stage, "step": divergence.step}
    return {**place, **_difference(divergence.difference), "message": str(divergence)}


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "name": difference.name,
        "measure": difference.measure,
        "amount": _finite(difference.amount),
        "tolerance": difference.tolerance,
        "max_abs_difference": _finite(difference.max_abs),
        "missing_from": difference.missing_from,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
