"""Megatron's distributed optimizer and scheduler, with a check of the gradients of all ranks before anything changes."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from rl_backend.contracts import AdamParams, OptimizerConfig, StepResult
from rl_backend.parallel.collectives import all_gather
from rl_backend.runtime.balance import ExpertBalance
from rl_backend.runtime.bridge.config import SAME_IN_MEGATRON, BridgeConfig
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.model.provider import override
from rl_backend.runtime.optimizer import rank_statistics, step_result, values_of_step

logger = logging.getLogger(__name__)

_NEVER = 2**31  # steps of a schedule that does not end: Megatron wants a number
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class BridgeOptimizer:
    """Megatron's Adam over float32 masters that are sharded over the data-parallel ranks.

    Rows beyond ``vocab_size`` pad the vocabulary and are no part of the gradient.

    Attributes:
        megatron: the ``MegatronOptimizer``, whose shards over all ranks make up the model once.
        scheduler: its ``OptimizerParamScheduler``, counting optimizer steps.
    """

    def __init__(
        self,
        options: BridgeConfig,
        chunks: Sequence[Any],
        groups: BridgeGroups,
        *,
        vocab_size: int,
        balance: ExpertBalance | None,
    ) -> None:
        self.balance = balance
        self._config = options.optimizer
        self._groups = groups
        self.megatron = get_megatron_optimizer(_megatron_config(options), list(chunks), use_gloo_process_groups=False)
        _count_in_adams_order(self.megatron)
        _allocate_moments(self.megatron)
        self._padding = sum(_padded_elements(self.megatron, chunks, groups, vocab_size))
        self.scheduler = _scheduler(self.megatron, self._config)

    def step(self, handle_name: str, adam: AdamParams | None = None) -> StepResult:
        """Global norm, finite check, clipping, step. Nothing changes when a gradient of any rank is not finite."""
        # Megatron's own step clips by a norm that is not finite, and so writes it into every parameter.
        result = self._step_result(found_not_finite=bool(self.megatron.prepare_grads()))
        if self.balance is not None:
            self.balance.step(taken=result.ok)
        if not result.ok:
            logger.warning("optimizer step of %r skipped: the gradient norm is %s", handle_name, result.grad_norm)
            return result
        given = {} if adam is None else adam.given
        clip_grad = given.get("clip_grad", self._config.clip_grad)
        if clip_grad > 0:
            for optimizer in distributed_optimizers(self.megatron):
                parameters = optimizer.get_parameters()
                if parameters:
                    decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                    clip_grad_by_total_norm_fp32(parameters, clip_grad, result.grad_norm, decoupled)
        with values_of_step(self.param_groups, given):
            self.megatron.step_with_ready_grads()
        return result

    def _step_result(self, *, found_not_finite: bool) -> StepResult:
        """What a step comes to, from the prepared gradients, the same on every rank. A collective over all ranks."""
        # Megatron's own norm adds squares in float32; without Transformer Engine and Apex it loses 5e-5 of the norm with an
        # embedding of 4099 rows. Its count of zeros takes in the rows that pad a vocabulary.
        parts = distributed_optimizers(self.megatron)
        gradients = [gradient for part in parts for gradient in part.get_grads_for_grad_norm()]
        count_zeros = self._config.log_num_zeros_in_grad
        mine = rank_statistics(gradients, self._groups.device, count_zeros=count_zeros)
        if count_zeros:
            mine[0, 1] -= self._padding
        # This rank already knows of an element that is not finite.
        if found_not_finite:
            mine[0, 0] = math.nan
        return step_result(all_gather(mine, self._groups.world_group, sum_gradients=False), count_zeros=count_zeros)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As ``torch.optim`` has them; :meth:`schedule_step` sets their learning rates and weight decays."""
        return self.megatron.param_groups  # type: ignore[no-any-return]

    def schedule_step(self) -> float:
        """Advances the schedules and returns the learning rate of the next step."""
        self.scheduler.step(increment=1)
        return self.learning_rate

    @property
    def num_steps(self) -> int:
        return num_steps(self.megatron)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self.scheduler.get_lr({"max_lr": self._config.lr, "min_lr": self._config.min_lr}))

    def restore_schedule(self, num_steps: int) -> None:
        self.scheduler.num_steps = 0
        self.scheduler.step(increment=num_steps)

    def held_tensors(self) -> Iterator[Tensor]:
        """The masters and moments of this rank, some of them views of parameters."""
        # Not the step counts: they are read wherever the state is.
        for part in distributed_optimizers(self.megatron):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = (value for name, value in part.optimizer.state[parameter].items() if name != "step")
                    yield from (tensor for tensor in [parameter, *state] if isinstance(tensor, Tensor))


def _megatron_config(options: BridgeConfig) -> Any:
    config, dtype = options.optimizer, getattr(torch, options.param_dtype)
    settings = {
        **{name: getattr(config, name) for name in SAME_IN_MEGATRON},
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_eps": config.eps,
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
    decay_steps = config.decay_steps or _NEVER
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(decay_steps, config.warmup_steps + 1),
        lr_decay_style=config.lr_decay_style,
        start_wd=start,
        end_wd=config.weight_decay,
        wd_incr_steps=max(config.total_training_steps, 0),
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_steps,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
    # Megatron asserts that they are more than those of warm-up, and computes every rate without that.
    scheduler.lr_decay_steps = decay_steps
    return scheduler


def _padded_elements(megatron: Any, chunks: Sequence[Any], groups: BridgeGroups, vocab_size: int) -> Iterator[int]:
    """How many elements of this rank's shards pad the vocabulary, for each parameter that has some and is counted."""
    first_row = {
        parameter: groups.pg.tp.rank() * parameter.shape[0]
        for model in unwrap_model(list(chunks))
        for name, parameter in model.named_parameters()
        if name.endswith(_VOCABULARY)
    }
    for part in distributed_optimizers(megatron):
        for parameter in part.model_param_group_index_map:
            if parameter in first_row and param_is_not_shared(parameter):
                rows, columns = parameter.shape
                real_rows = min(max(vocab_size - first_row[parameter], 0), rows)
                span = part._get_model_param_range_map(parameter)["param"]
                yield max(0, int(span.end) - max(int(span.start), real_rows * columns))


class ParameterState(NamedTuple):
    """This rank's part of one parameter, from ``start`` to ``end`` in elements of the flattened parameter.

    ``tensors`` are flat: ``param`` (the master; a view of the parameter when it is float32), ``exp_avg`` and ``exp_avg_sq``.
    """

    parameter: nn.Parameter
    start: int
    end: int
    tensors: Mapping[str, Tensor]


def distributed_optimizers(megatron: Any) -> list[Any]:
    """The ``DistributedOptimizer`` objects in a ``MegatronOptimizer``: one for experts, one for the rest."""
    parts = getattr(megatron, "chained_optimizers", [megatron])
    return [part for part in parts if not part.is_stub_optimizer]


def _count_in_adams_order(megatron: Any) -> None:
    # Megatron counts a group's parameters in the order of its buffers, but its Adam has those of float32 first.
    for part in distributed_optimizers(megatron):
        groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
        places = {each: (number, place) for number, both in enumerate(groups) for place, each in enumerate(chain(*both))}
        part.model_param_group_index_map = {each: places[each] for each in part.model_param_group_index_map}


def _allocate_moments(megatron: Any) -> None:
    # What Adam would allocate in its first step: offloading and checkpoints see one layout at all times.
    for part in distributed_optimizers(megatron):
        adam = part.optimizer
        fresh = [(group, each) for group in adam.param_groups for each in group["params"] if not adam.state[each]]
        part.init_state_fn(adam, part.config)
        for group, parameter in fresh:
            if isinstance(adam, torch.optim.Adam):
                device = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
                adam.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=device)


def parameter_states(megatron: Any) -> Iterator[ParameterState]:
    """Every parameter of which this rank has a part."""
    for part in distributed_optimizers(megatron):
        for parameter in part.model_param_group_index_map:
            span = part._get_model_param_range_map(parameter)["param"]
            tensors = part._get_main_param_and_optimizer_states(parameter)
            held = {name: tensors[name] for name in ("param", "exp_avg", "exp_avg_sq")}
            yield ParameterState(parameter, span.start, span.end, held)


def _counters(megatron: Any) -> Iterator[dict[str, Any]]:
    # torch counts Adam's steps for each parameter, Transformer Engine for each group.
    for part in distributed_optimizers(megatron):
        adam = part.optimizer
        if isinstance(adam, torch.optim.Adam):
            yield from adam.state.values()
        else:
            yield from (group for group in adam.param_groups if group["params"])


def num_steps(megatron: Any) -> int:
    return next((int(counter.get("step", 0)) for counter in _counters(megatron)), 0)


def set_num_steps(megatron: Any, steps: int) -> None:
    """Makes the next step of Adam the one after ``steps``."""
    for counter in _counters(megatron):
        step = counter.get("step")
        counter["step"] = step.fill_(steps) if isinstance(step, Tensor) else steps


def mark_sinks(chunks: Iterable[nn.Module]) -> None:
    """Marks the sinks of a rank's heads as a part of all; before Megatron's optimizer, which copies marks to its masters."""
    # Megatron and Transformer Engine leave them unmarked, and the global gradient norm would have the first rank's alone
    # (Megatron-LM #7452, finding 8).
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("softmax_offset"):
                vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
