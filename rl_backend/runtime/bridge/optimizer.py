"""Megatron's distributed optimizer and scheduler, with a check of the gradients of all ranks before anything changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rl_backend.contracts import BridgeConfig, HandleError, OptimizerConfig, StepResult
from rl_backend.runtime.bridge.gradient_statistics import GradientReader
from rl_backend.runtime.bridge.groups import BridgeGroups
from rl_backend.runtime.bridge.optimizer_state import allocate_moments, distributed_optimizers
from rl_backend.runtime.bridge.overrides import override

logger = logging.getLogger(__name__)

_NEVER = 2**31
"""Steps of a schedule that does not end; Megatron wants a number."""


class BridgeOptimizer:
    """Megatron's Adam over float32 masters that are sharded over the data-parallel ranks.

    Attributes:
        megatron: the ``MegatronOptimizer``.
        scheduler: its ``OptimizerParamScheduler``, counting optimizer steps.
    """

    def __init__(self, options: BridgeConfig, chunks: Sequence[Any], groups: BridgeGroups, *, vocab_size: int) -> None:
        self._config = options.optimizer
        self.megatron = get_megatron_optimizer(_megatron_config(options), list(chunks), use_gloo_process_groups=False)
        allocate_moments(self.megatron)
        self._gradients = GradientReader(
            self.megatron, chunks, groups, vocab_size=vocab_size, count_zeros=self._config.log_num_zeros_in_grad
        )
        self.scheduler = _scheduler(self.megatron, self._config)

    def step(self, handle_name: str, *, has_gradients: bool) -> StepResult:
        """Global norm, finite check, clipping, step. Nothing changes when a gradient of any rank is not finite.

        Megatron's own ``step`` clips by a norm that is not finite, and so writes it into every parameter.

        Raises:
            HandleError: there are no gradients.
        """
        if not has_gradients:
            raise HandleError(
                f"optimizer_step on {handle_name!r} without gradients; call forward_backward first", handle=handle_name
            )
        norm, num_zeros = self._gradients.read(found_not_finite=bool(self.megatron.prepare_grads()))
        if not math.isfinite(norm):
            logger.warning("optimizer step of %r skipped: the gradient norm is %s", handle_name, norm)
            return StepResult(False, norm, num_zeros)
        if self._config.clip_grad > 0:
            for optimizer in distributed_optimizers(self.megatron):
                parameters = optimizer.get_parameters()
                if parameters:
                    decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                    clip_grad_by_total_norm_fp32(parameters, self._config.clip_grad, norm, decoupled)
        self.megatron.step_with_ready_grads()
        return StepResult(True, norm, num_zeros)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As ``torch.optim`` has them; :meth:`schedule_step` sets their learning rates and weight decays."""
        return self.megatron.param_groups  # type: ignore[no-any-return]

    def schedule_step(self) -> float:
        """Advances the schedules and returns the learning rate of the next step."""
        self.scheduler.step(increment=1)
        return self.learning_rate

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.scheduler.get_lr({"max_lr": self._config.lr, "min_lr": self._config.min_lr}))

    @property
    def num_schedule_steps(self) -> int:
        """Scheduler steps taken."""
        return int(self.scheduler.num_steps)

    def restore_schedule(self, num_steps: int) -> None:
        """Sets the schedules to ``num_steps`` steps taken."""
        self.scheduler.num_steps = 0
        self.scheduler.step(increment=num_steps)

    def zero_grad(self) -> None:
        """Drops the gradients of the masters; those of the model are in the DDP buffers."""
        self.megatron.zero_grad()


def _megatron_config(options: BridgeConfig) -> Any:
    config, dtype = options.optimizer, getattr(torch, options.param_dtype)
    settings = {
        "optimizer": config.optimizer,
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_eps": config.eps,
        "clip_grad": config.clip_grad,
        "log_num_zeros_in_grad": config.log_num_zeros_in_grad,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_distributed_optimizer": True,
        "overlap_param_gather": bool(options.override_ddp_config.get("overlap_param_gather", False)),
    }
    return override(
        "BridgeConfig.override_optimizer_config", MegatronOptimizerConfig, options.override_optimizer_config, settings
    )


def _scheduler(optimizer: Any, config: OptimizerConfig) -> Any:
    start = config.weight_decay if config.weight_decay_start is None else config.weight_decay_start
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps or _NEVER,
        lr_decay_style=config.lr_decay_style,
        start_wd=start,
        end_wd=config.weight_decay,
        wd_incr_steps=max(config.total_training_steps, 0),
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_steps,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
