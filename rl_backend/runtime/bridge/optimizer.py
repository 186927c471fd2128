"""Megatron's distributed optimizer and scheduler, with a check of the gradients of all ranks before anything changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from rl_backend.contracts import HandleError, OptimizerConfig, StepResult
from rl_backend.parallel.collectives import all_gather_into
from rl_backend.runtime.bridge.groups import BridgeGroups
from rl_backend.runtime.bridge.optimizer_state import allocate_moments, distributed_optimizers
from rl_backend.runtime.bridge.overrides import override
from rl_backend.runtime.bridge_config import BridgeConfig
from rl_backend.runtime.gradient_squares import sum_of_squares

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class GradientStatistics(NamedTuple):
    """Attributes:
    norm: 2-norm of the gradient of the whole model; not finite when an element of any rank is not.
    num_zeros: its zeros; None when they are not counted.
    """

    norm: float
    num_zeros: int | None


class GradientReader:
    """Reads gradients that ``prepare_grads`` has prepared.

    Megatron's own norm adds squares in float32; without Transformer Engine and Apex it loses 5e-5 of the norm with an
    embedding of 4099 rows. Its count of zeros takes in the rows that pad a vocabulary.

    Args:
        megatron: the ``MegatronOptimizer``, whose shards over all ranks make up the model once.
        chunks: the model's stages on this rank.
        vocab_size: tokens of the model. Rows beyond it pad the vocabulary and are no part of the gradient.
    """

    def __init__(
        self, megatron: Any, chunks: Sequence[Any], groups: BridgeGroups, *, vocab_size: int, count_zeros: bool
    ) -> None:
        self._megatron = megatron
        self._groups = groups
        self._count_zeros = count_zeros
        first_row = {
            parameter: groups.pg.tp.rank() * parameter.shape[0]
            for model in unwrap_model(list(chunks))
            for name, parameter in model.named_parameters()
            if name.endswith(_VOCABULARY)
        }
        self._padding = sum(_padded_elements(megatron, first_row, vocab_size)) if count_zeros else 0

    def read(self, *, found_not_finite: bool) -> GradientStatistics:
        """A collective over all ranks; the same result on each.

        Args:
            found_not_finite: this rank knows already of an element that is not; the norm becomes NaN.
        """
        mine = torch.zeros(1, 2, dtype=torch.float64, device=self._groups.device)
        gradients = [
            gradient
            for part in distributed_optimizers(self._megatron)
            for gradient in part.get_grads_for_grad_norm()
            if gradient.numel()
        ]
        if gradients:
            mine[0, 0] = sum_of_squares(gradients)
            if self._count_zeros:
                zeros = torch.stack([gradient.numel() - gradient.count_nonzero() for gradient in gradients]).sum()
                mine[0, 1] = zeros - self._padding
        if found_not_finite:
            mine[0, 0] = math.nan
        rows = mine
        if self._groups.world_size > 1:
            rows = mine.new_empty(self._groups.world_size, 2)
            all_gather_into(rows, mine, group=self._groups.world_group)
        squares, zeros_everywhere = (math.fsum(column) for column in rows.T.tolist())
        norm = math.sqrt(squares) if math.isfinite(squares) else squares
        return GradientStatistics(norm, int(zeros_everywhere) if self._count_zeros else None)


def _padded_elements(megatron: Any, first_row: dict[nn.Parameter, int], vocab_size: int) -> Iterator[int]:
    """How many elements of this rank's shards pad the vocabulary, for each parameter that has some and is counted."""
    for part in distributed_optimizers(megatron):
        for parameter in part.model_param_group_index_map:
            if parameter in first_row and param_is_not_shared(parameter):
                span = part._get_model_param_range_map(parameter)["param"]
                yield _overlap(span, parameter, vocab_size - first_row[parameter])


def _overlap(span: Any, parameter: Tensor, real_rows: int) -> int:
    start = min(max(real_rows, 0), parameter.shape[0]) * parameter.shape[1]
    return max(0, int(span.end) - max(int(span.start), start))


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
