"""Operations as they run inside each training rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Concatenate

import torch
from torch import Tensor

from actors.train.context import HandleRef, RankContext
from rl_backend.contracts import LossFn, Metric, PackedBatch, PendingStepResult, StepResult
from rl_backend.contracts.operations import Operation


@dataclass(frozen=True)
class BuiltModel:
    """What a rank says about a model that it built."""

    key: int
    name: str
    data_parallel_rank: int
    data_parallel_size: int
    is_source: bool
    micro_batch_multiple: int


@dataclass(frozen=True)
class RankForward:
    """One rank's ForwardResult on its way to the driver.

    Attributes:
        outputs: name -> the rank's sequences end to end, (T, ...) on the CPU.
    """

    losses: tuple[float, ...]
    metrics: Mapping[str, Metric]
    outputs: Mapping[str, Tensor]


def run(context: RankContext, operation: Operation, loss: LossFn | None) -> Any:
    """Runs an operation on this rank, with its arguments as they are; returns what the rank answers.

    Args:
        loss: for an operation that takes one, and its arguments do not hold.
    """
    arguments = dict(operation.arguments)
    if loss is not None:
        arguments["loss_fn"] = loss
    if operation.name in _OWN:
        return _OWN[operation.name](context, **arguments)
    handle = context.handle(arguments.pop("handle"))
    return getattr(context.runtime, operation.name)(handle, **arguments)


def _build_model(context: RankContext, **arguments: Any) -> BuiltModel:
    handle = context.runtime.build_model(**arguments)
    return BuiltModel(
        context.keep(handle),
        handle.name,
        handle.data_parallel_rank,
        handle.data_parallel_size,
        context.runtime.is_mp_src_rank_with_outputs(handle),
        handle.micro_batch_multiple,
    )


def _forward_backward(
    context: RankContext, handle: HandleRef, data: Sequence[PackedBatch], loss_fn: LossFn | None = None, **arguments: Any
) -> RankForward:
    runtime, model = context.runtime, context.handle(handle)
    with runtime.eval_mode(model) if arguments.get("forward_only") else runtime.train_mode(model):
        result = runtime.forward_backward(model, data, loss_fn, **arguments)
    # A view of a tensor is pickled with all of the tensor, so sequences travel as one.
    outputs = {name: torch.cat(list(rows)).cpu() for name, rows in result.outputs.items()}
    return RankForward(result.losses, dict(result.metrics), outputs)


def _optimizer_step(context: RankContext, handle: HandleRef) -> StepResult | None:
    """None for a step that other ranks still have a part of: to answer with its result would wait for them."""
    result: StepResult = context.runtime.optimizer_step(context.handle(handle))
    if not isinstance(result, PendingStepResult):
        return result
    context.keep_pending(result)
    return None


def _step_result(context: RankContext, handle: HandleRef, number: int) -> StepResult:
    return context.take_pending(number)


def _weight_version(context: RankContext, handle: HandleRef) -> int:
    return context.handle(handle).weight_version


def _run_on_ranks[**P, R](
    context: RankContext,
    function: Callable[Concatenate[RankContext, P], R],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> R:
    return function(context, *args, **kwargs)


def _shutdown(context: RankContext) -> None:
    with ExitStack() as stack:
        stack.callback(context.runtime.close)
        for kept in context.state.values():
            if callable(getattr(kept, "close", None)):
                stack.callback(kept.close)


_OWN: Mapping[str, Callable[..., Any]] = {
    "build_model": _build_model,
    "forward_backward": _forward_backward,
    "optimizer_step": _optimizer_step,
    "step_result": _step_result,
    "weight_version": _weight_version,
    "run_on_ranks": _run_on_ranks,
    "shutdown": _shutdown,
}
"""Operations that are more than a call of the runtime's method of that name."""
