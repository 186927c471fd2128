"""The atoms as they run inside each training rank; ``TrainGroup`` calls them by reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from actors.train.context import HandleRef, RankContext
from rl_backend.contracts import Head, LossFn, Metric, OptimizerConfig, PackedBatch, StepResult
from rl_backend.runtime import RouterReplay


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


def build_model(
    context: RankContext,
    forward_only: bool,
    name: str,
    head: Head,
    hf_path: str | None,
    optimizer: OptimizerConfig | None,
) -> BuiltModel:
    handle = context.runtime.build_model(
        forward_only=forward_only, name=name, head=head, hf_path=hf_path, optimizer=optimizer
    )
    return BuiltModel(
        context.keep(handle),
        handle.name,
        handle.data_parallel_rank,
        handle.data_parallel_size,
        context.runtime.is_mp_src_rank_with_outputs(handle),
        handle.micro_batch_multiple,
    )


def forward_backward(
    context: RankContext,
    ref: HandleRef,
    data: Sequence[PackedBatch],
    forward_only: bool,
    router_replay: RouterReplay,
    loss_fn: LossFn | None,
) -> RankForward:
    runtime, handle = context.runtime, context.handle(ref)
    with runtime.eval_mode(handle) if forward_only else runtime.train_mode(handle):
        result = runtime.forward_backward(handle, data, loss_fn, forward_only=forward_only, router_replay=router_replay)
    # A view of a tensor is pickled with all of the tensor, so sequences travel as one.
    outputs = {name: torch.cat(list(rows)).cpu() for name, rows in result.outputs.items()}
    return RankForward(result.losses, dict(result.metrics), outputs)


def zero_grad(context: RankContext, ref: HandleRef) -> None:
    context.runtime.zero_grad(context.handle(ref))


def optimizer_step(context: RankContext, ref: HandleRef) -> StepResult:
    return context.runtime.optimizer_step(context.handle(ref))


def lr_scheduler_step(context: RankContext, ref: HandleRef) -> float:
    return context.runtime.lr_scheduler_step(context.handle(ref))


def move(
    context: RankContext, ref: HandleRef, device: Literal["cpu", "device"], model: bool, optimizer: bool, grad: bool
) -> None:
    context.runtime.to(context.handle(ref), device, model=model, optimizer=optimizer, grad=grad)


def save_checkpoint(
    context: RankContext, ref: HandleRef, path: str, hf: bool, asynchronous: bool, extra: Mapping[str, Any] | None
) -> None:
    context.runtime.save_checkpoint(context.handle(ref), path, hf=hf, asynchronous=asynchronous, extra=extra)


def wait_for_checkpoint(context: RankContext, ref: HandleRef) -> None:
    context.runtime.wait_for_checkpoint(context.handle(ref))


def checkpoint_is_pending(context: RankContext, ref: HandleRef) -> bool:
    return context.runtime.checkpoint_is_pending(context.handle(ref))


def load_checkpoint(context: RankContext, ref: HandleRef, path: str) -> dict[str, Any]:
    return context.runtime.load_checkpoint(context.handle(ref), path)


def weight_version(context: RankContext, ref: HandleRef) -> int:
    return context.handle(ref).weight_version


def close(context: RankContext) -> None:
    with ExitStack() as stack:
        stack.callback(context.runtime.close)
        for kept in context.state.values():
            if callable(getattr(kept, "close", None)):
                stack.callback(kept.close)
