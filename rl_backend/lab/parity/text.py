"""A result as text for a person and as JSON for a program."""

from dataclasses import asdict
from typing import Any

from rl_backend.lab.parity.compare import StageResult, StepComparison
from rl_backend.lab.parity.config import SIDES
from rl_backend.lab.parity.run import ParityResult
from rl_backend.lab.text import count, finite, table

LEAST_LR = 1e-5
"""Below it, the weights' tolerance hides what weight decay changes in a step."""

LEAST_LOSS_FALL = 0.05
"""Part of itself by which the loss must fall for the later steps to say much."""


def as_text(result: ParityResult) -> str:
    """Tables of stages and steps, then the verdict."""
    config, comparison = result.config, result.comparison
    lines = [
        f"{config.model}: {config.dtype} on {config.device}, lr {config.lr:g}, {config.num_sequences} sequences of "
        f"{result.num_tokens} tokens in {config.num_micro_batches} micro-batches for each data-parallel rank"
    ]
    if config.lora is not None:
        lora, targets = config.lora, ", ".join(config.lora.targets)
        lines.append(f"  LoRA of rank {lora.rank}, scale {lora.scale:g}, on {targets}; all else is frozen")
    for name in SIDES:
        side = config.side(name)
        layout = (f"{dimension}={size}" for dimension, size in side.sizes.items() if size != 1)
        lines.append(f"  {name:9}  {' '.join((side.runtime, *layout, f'({count(side.world_size, "rank")})'))}")
    stage_titles = ("step 0", "compared", "difference", "tolerance", "largest in")
    stages = table("  {:14}  {:>8}  {:>10}  {:>9}  {}", [stage_titles, *(_stage_row(stage) for stage in comparison.stages)])
    lines += ["", *(line.rstrip() for line in stages)]
    activations = next(stage for stage in comparison.stages if stage.stage == "activations")
    if left_out := activations.not_compared:
        more = f" and {len(left_out) - 4} more" if len(left_out) > 4 else ""
        lines.append(f"  not compared, on one side only: {', '.join(left_out[:4])}{more}")
    if elsewhere := activations.ends_elsewhere:
        named = ", ".join(f"{each.name} ({each.measure} {each.amount:.1e})" for each in elsewhere[:4])
        more = f" and {len(elsewhere) - 4} more" if len(elsewhere) > 4 else ""
        lines.append(f"  ends elsewhere, what follows agrees: {named}{more}")
    number = "  {:>11}  {:>11}  {:>10}"
    step_titles = ("step", "loss", "candidate", "difference", "grad norm", "candidate", "difference", "")
    lines += ["", *table("  {:>4}" + 2 * number + "{}", [step_titles, *(_step_row(step) for step in comparison.steps)])]
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
    config, comparison, divergence = result.config, result.comparison, result.comparison.first_divergence
    report = config.model_dump(
        include={"model", "dtype", "lr", "weight_decay", "seed", "lora", "num_sequences", "num_micro_batches", "device"}
    )
    report["num_tokens"] = result.num_tokens
    for name in SIDES:
        side = config.side(name)
        report[name] = {
            "runtime": side.runtime,
            "world_size": side.world_size,
            "layout": side.sizes,
            "options": side.options,
            "versions": result.versions[name],
        }
    report |= {
        "max_loss_rel_diff": comparison.max_loss_difference,
        "max_grad_norm_rel_diff": comparison.max_grad_norm_difference,
        "loss_fall": comparison.loss_fall,
        "first_divergence": None,
        "stages": [asdict(stage) for stage in comparison.stages],
        "steps": [_step(step) for step in comparison.steps],
    }
    if divergence is not None:
        place = {"stage": divergence.stage, "step": divergence.step, "message": str(divergence)}
        report["first_divergence"] = place | asdict(divergence.difference)
    plain: dict[str, Any] = finite(report)
    return plain


def _step(step: StepComparison) -> dict[str, Any]:
    numbers = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(step.loss, step.grad_norm, strict=True)]
    return {
        "step": step.step,
        **dict(zip(SIDES, numbers, strict=True)),
        "loss_rel_diff": step.loss_difference.amount,
        "grad_norm_rel_diff": step.grad_norm_difference.amount,
        "loss_tolerance": step.loss_difference.tolerance,
        "grad_norm_tolerance": step.grad_norm_difference.tolerance,
    }


def _stage_row(stage: StageResult) -> tuple[str, ...]:
    largest = stage.largest
    amount = "missing" if largest.missing_from is not None else f"{largest.amount:.1e}"
    remarks = [
        largest.name,
        f"({largest})" if largest.missing_from is not None else "",
        f"({largest.measure})" if largest.measure != "relative difference" else "",
        "" if stage.first_over is None else "<- over",
    ]
    return stage.stage, str(stage.compared), amount, f"{largest.tolerance:.0e}", " ".join(filter(None, remarks))


def _step_row(step: StepComparison) -> tuple[str, ...]:
    parts = [("loss", step.loss, step.loss_difference), ("grad norm", step.grad_norm, step.grad_norm_difference)]
    cells = [(f"{one[0]:.6f}", f"{one[1]:.6f}", f"{difference.amount:.1e}") for _, one, difference in parts]
    over = " and ".join(name for name, _, difference in parts if difference.over)
    return (str(step.step), *cells[0], *cells[1], f"  <- {over} over" if over else "")
