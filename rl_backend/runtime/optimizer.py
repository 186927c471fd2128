"""What optimizers of every runtime share: schedules, values of one step, the norm of a gradient, and clipping."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_backend.contracts import OptimizerConfig, StepResult


class ParameterSchedule:
    """Learning rate and weight decay by the number of scheduler steps taken.

    The formulas are those of ``megatron.core.optimizer_param_scheduler.OptimizerParamScheduler`` (Megatron-Core 0.19).
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.num_steps = 0

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        config, steps = self._config, self.num_steps
        warmup = config.warmup_steps
        if warmup > 0 and steps <= warmup:
            return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * float(steps) / float(warmup)
        if config.lr_decay_style == "constant":
            return config.lr
        decay = config.decay_steps
        if decay is not None and steps > decay:
            return config.min_lr
        if config.lr_decay_style == "inverse-square-root":
            return max(config.min_lr, config.lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(steps, 1)))
        assert decay is not None, "OptimizerConfig requires decay_steps for every remaining style"
        return config.min_lr + self._coefficient(decay) * (config.lr - config.min_lr)

    @property
    def weight_decay(self) -> float:
        """Of the next optimizer step, for parameters that are decayed."""
        config = self._config
        end = config.weight_decay
        start = end if config.weight_decay_start is None else config.weight_decay_start
        if config.weight_decay_incr_style == "constant" or self.num_steps > config.total_training_steps:
            return end
        ratio = float(self.num_steps) / float(config.total_training_steps)
        if config.weight_decay_incr_style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1.0)
        return start + ratio * (end - start)

    def step(self) -> float:
        self.num_steps += 1
        return self.learning_rate

    def _coefficient(self, decay_steps: int) -> float:
        """Fraction of ``lr - min_lr`` that is left."""
        config, steps = self._config, self.num_steps
        if config.lr_decay_style != "WSD":
            ratio = float(steps - config.warmup_steps) / float(decay_steps - config.warmup_steps)
            return 1.0 - ratio if config.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        assert config.lr_wsd_decay_steps is not None, "OptimizerConfig requires lr_wsd_decay_steps for WSD"
        anneal_start = decay_steps - config.lr_wsd_decay_steps
        if steps <= anneal_start:
            return 1.0
        ratio = float(steps - anneal_start) / float(config.lr_wsd_decay_steps)
        match config.lr_wsd_decay_style:
            case "linear":
                return 1.0 - ratio
            case "cosine":
                return 0.5 * (math.cos(math.pi * ratio) + 1.0)
            case "exponential":
                return 2.0 * math.pow(0.5, ratio) - 1.0
            case "minus_sqrt":
                return 1.0 - math.sqrt(ratio)


@contextmanager
def values_of_step(param_groups: Sequence[dict[str, Any]], given: Mapping[str, Any]) -> Generator[None]:
    """Inside, parameter groups of ``torch.optim.AdamW`` have the given values in place of their own.

    Args:
        param_groups: each with a ``wd_mult``, 0 for what is not decayed.
        given: of ``lr``, ``betas``, ``eps`` and ``weight_decay`` those that change.
    """
    before = [{name: group[name] for name in given if name in group} for group in param_groups]
    try:
        for group, own in zip(param_groups, before, strict=True):
            group.update({name: given[name] for name in own})
            if "weight_decay" in own:
                group["weight_decay"] *= group["wd_mult"]
        yield
    finally:
        for group, own in zip(param_groups, before, strict=True):
            group.update(own)


_CHUNK = 2**20
"""Elements that are converted to float64 at a time."""


def rank_statistics(gradients: Iterable[Tensor], device: torch.device, *, count_zeros: bool) -> Tensor:
    """(1, 2) float64: squared 2-norm of this rank's gradients, and their zeros, 0 unless they are counted."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    statistics = torch.zeros(1, 2, dtype=torch.float64, device=device)
    if filled:
        statistics[0, 0] = sum_of_squares(filled)
        if count_zeros:
            statistics[0, 1] = torch.stack([gradient.numel() - gradient.count_nonzero() for gradient in filled]).sum()
    return statistics


def step_result(rows: Tensor, *, count_zeros: bool) -> StepResult:
    """Norm and zeros of the whole gradient, from all ranks' :func:`rank_statistics`, and whether a step may be taken."""
    # Exact sums: neither the order of the ranks nor the layout makes a difference.
    squares, zeros = (math.fsum(column) for column in rows.T.tolist())
    norm = math.sqrt(squares)
    return StepResult(math.isfinite(norm), norm, int(zeros) if count_zeros else None)


def clip_factor(clip_grad: float, norm: float) -> float:
    """What gradients are multiplied by to bring ``norm`` down to ``clip_grad``; 1 where there is nothing to do."""
    # As torch and Megatron do it, so that results can be compared with theirs.
    return min(1.0, clip_grad / (norm + 1.0e-6)) if clip_grad > 0 else 1.0


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Sum over all elements of all tensors, () float64; the tensors are on one device, with at least one element."""
    # float32 sums lose what is small beside the sum so far; a whole tensor in float64 would take twice its memory.
    chunks = [chunk for gradient in gradients for chunk in gradient.detach().reshape(-1).split(_CHUNK) if chunk.numel()]
    return torch.stack(torch._foreach_norm(chunks, 2, dtype=torch.float64)).square().sum()
