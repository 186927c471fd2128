"""Optimizer and learning-rate schedule, with the names and defaults of verl's McoreOptimizerConfig."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rl_backend.contracts.base_config import BaseConfig, HasEffect
from rl_backend.contracts.errors import ConfigError

NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]

_DECAYS = HasEffect(lambda c: c.lr_decay_style != "constant", "lr_decay_style='constant' never decays; set the style")
_WSD = HasEffect(lambda c: c.lr_decay_style == "WSD", "lr_decay_style={0.lr_decay_style!r} does not read it; use WSD")
_WARMS_UP = HasEffect(
    lambda c: c.warmup_steps, "there is no warm-up to begin with it; set lr_warmup_steps or lr_warmup_steps_ratio"
)
_BY_RATIO = HasEffect(lambda c: c.lr_warmup_steps < 0, "lr_warmup_steps={0.lr_warmup_steps} decides; give one of them")


class OptimizerConfig(BaseConfig):
    """AdamW with Megatron's schedules.

    Attributes:
        lr: peak learning rate.
        min_lr: learning rate at the end of the decay, and the least of ``inverse-square-root``.
        lr_warmup_init: learning rate of the first step of a warm-up.
        lr_warmup_steps: optimizer steps of linear warm-up; -1 takes ``lr_warmup_steps_ratio * total_training_steps``.
        lr_decay_steps: step at which ``min_lr`` is reached, warm-up included; None takes ``total_training_steps``.
        lr_wsd_decay_steps: length of the final decay of the ``WSD`` style, in steps.
        total_training_steps: -1 when unknown; every style but ``constant`` and ``inverse-square-root`` needs it or
            ``lr_decay_steps``.
        weight_decay: final value; biases and parameters of one dimension are never decayed (as in Megatron).
        weight_decay_start: first value when ``weight_decay_incr_style`` is not ``constant``; None takes ``weight_decay``.
        clip_grad: largest global gradient norm; 0 switches clipping off.
        log_num_zeros_in_grad: count zeros in the gradient in each step (the third result of ``optimizer_step``).
    """

    optimizer: Literal["adam"] = "adam"
    lr: NonNegative = 1e-3
    min_lr: Annotated[NonNegative, _DECAYS] = 0.0
    lr_warmup_init: Annotated[NonNegative, _WARMS_UP] = 0.0
    lr_warmup_steps: int = Field(default=-1, ge=-1)
    lr_warmup_steps_ratio: Annotated[float, _BY_RATIO] = Field(default=0.0, ge=0.0, le=1.0)
    lr_decay_steps: Annotated[int | None, Field(ge=1), _DECAYS] = None
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    lr_wsd_decay_style: Annotated[Literal["exponential", "linear", "cosine", "minus_sqrt"], _WSD] = "exponential"
    lr_wsd_decay_steps: Annotated[int | None, Field(ge=0), _WSD] = None
    total_training_steps: int = Field(default=-1, ge=-1)
    weight_decay: NonNegative = 0.01
    weight_decay_start: NonNegative | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    clip_grad: NonNegative = 1.0
    log_num_zeros_in_grad: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field, value, problem in self._problems():
            raise ConfigError.of(f"{type(self).__name__}.{field}", value, problem)
        return self

    def _problems(self) -> Iterator[tuple[str, object, str]]:
        style, decay_steps = self.lr_decay_style, self.decay_steps
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield "betas", self.betas, "each must be in [0, 1)"
        if self.min_lr > self.lr:
            yield "min_lr", self.min_lr, f"must not exceed lr={self.lr}"
        if self.lr_warmup_init > self.lr:
            yield "lr_warmup_init", self.lr_warmup_init, f"must not exceed lr={self.lr}"
        if style in ("linear", "cosine", "WSD"):
            if decay_steps is None:
                yield "lr_decay_style", style, "needs lr_decay_steps or total_training_steps"
            elif self.warmup_steps >= decay_steps:
                yield "lr_warmup_steps", self.warmup_steps, f"must be less than lr_decay_steps={decay_steps}"
        if style == "WSD":
            if self.lr_wsd_decay_steps is None:
                yield "lr_wsd_decay_steps", None, "lr_decay_style='WSD' needs it"
            elif self.lr_wsd_decay_steps > (decay_steps or 0):
                yield "lr_wsd_decay_steps", self.lr_wsd_decay_steps, f"must not exceed lr_decay_steps={decay_steps}"
        start = self.weight_decay if self.weight_decay_start is None else self.weight_decay_start
        increase = self.weight_decay_incr_style
        if increase == "constant" and start != self.weight_decay:
            kept = f"weight_decay_incr_style='constant' keeps weight_decay={self.weight_decay}"
            yield "weight_decay_start", start, f"{kept}; leave it None or set the style"
        if start > self.weight_decay:
            yield "weight_decay_start", start, f"must not exceed weight_decay={self.weight_decay}"
        if self.total_training_steps <= 0:
            if self.lr_warmup_steps == -1 and self.lr_warmup_steps_ratio > 0:
                yield "lr_warmup_steps_ratio", self.lr_warmup_steps_ratio, "needs total_training_steps"
            if increase != "constant":
                yield "weight_decay_incr_style", increase, "needs total_training_steps"

    @property
    def warmup_steps(self) -> int:
        # A count decides over a ratio, as in verl.
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * max(self.total_training_steps, 0))

    @property
    def decay_steps(self) -> int | None:
        """Optimizer steps until ``min_lr``, or None when the schedule never decays to it."""
        if self.lr_decay_steps is not None:
            return self.lr_decay_steps
        return self.total_training_steps if self.total_training_steps > 0 else None


class AdamParams(BaseConfig):
    """Values of AdamW for one ``optimizer_step``, as of :class:`OptimizerConfig`; None takes those of its schedules."""

    lr: NonNegative | None = None
    betas: tuple[Beta, Beta] | None = None
    eps: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    weight_decay: NonNegative | None = None
    clip_grad: NonNegative | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}
