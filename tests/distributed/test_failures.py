"""Bad data, bad losses and bad gradients on some ranks: every rank hears of it, and the handle stays usable."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_backend.contracts import BatchError, HandleError, MetricValue, ModelOutput, PackedBatch
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.native import (
    assert_equal_tensors,
    deal,
    gradients,
    micro_batches,
    open_runtime,
    optimizer_state,
    token_loss,
    train,
    weights,
)
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4], [5], [6], [7]]


def bad_batch(kind: str, rank: int) -> list[PackedBatch]:
    """Data that only rank 1 gets wrong."""
    good = micro_batches(deal(SPLIT, 2)[rank], dp_size=2)
    if rank == 0:
        return good
    match kind:
        case "another number of micro-batches":
            return good[:1]
        case "no micro-batches":
            return []
        case "a token outside the vocabulary":
            return [PackedBatch(torch.full((3,), 128), torch.tensor([3])), *good[1:]]
        case _:
            return [PackedBatch(torch.zeros(101, dtype=torch.int64), torch.tensor([101])), *good[1:]]


def refused_data_job(model: str, kind: str) -> tuple[str, float, float]:
    """The error of this rank, seconds until it came, and the loss afterwards."""
    rank = dist.get_rank()
    with open_runtime(model, max_tokens=100) as runtime:
        handle = runtime.build_model()
        start = time.monotonic()
        try:
            runtime.forward_backward(handle, bad_batch(kind, rank), token_loss)
        except BatchError as error:
            message, seconds = str(error), time.monotonic() - start
        else:
            message, seconds = "", 0.0
        loss = runtime.forward_backward(handle, micro_batches(deal(SPLIT, 2)[rank], dp_size=2), token_loss).loss
        assert runtime.optimizer_step(handle).ok
    return message, seconds, loss


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("another number of micro-batches", "has 1 micro-batches, others have 1 to 3"),
        ("no micro-batches", "without micro-batches"),
        ("a token outside the vocabulary", "token 128; the vocabulary has 128 tokens"),
        ("too many tokens", "101 tokens; max_tokens_per_micro_batch=100"),
    ],
)
def test_data_that_one_rank_gets_wrong_is_refused_on_all_within_seconds(
    ranks: RankPool, tied_model: Path, kind: str, reason: str
) -> None:
    results = ranks.run(refused_data_job, str(tied_model), kind)
    assert reason in results[1][0]
    assert results[0][0]
    assert all(seconds < 5 and loss > 0 for _, seconds, loss in results)


def failing_loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
    if data.meta["fail"]:
        raise ValueError("no such advantage")
    return token_loss(model_output, data, dp_group)


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("no such advantage")


def failing_backward(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
    loss, metrics = token_loss(model_output, data, dp_group)
    return (_FailsBackward.apply(loss) if data.meta["fail"] else loss), metrics


LOSSES = {"model": token_loss, "loss": failing_loss, "backward": failing_backward}


def fail_in_layer(handle: NativeHandle, calls_before: int) -> RemovableHandle:
    """Makes the second layer raise, as running out of memory there would, after some calls that succeed."""
    calls = iter(range(calls_before))

    def fail(module: nn.Module, arguments: Any) -> None:
        if next(calls, None) is None:
            raise ValueError("no such advantage")

    return handle.model.get_submodule("layers.1").register_forward_pre_hook(fail)


def failing_pass_job(model: str, where: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients after a failed pass and zero_grad, and those of a fresh handle."""
    rank = dist.get_rank()
    data = micro_batches(deal(SPLIT, 2)[rank], dp_size=2, fail=False)
    broken = [*data[:1], *micro_batches(deal(SPLIT, 2)[rank][1:2], dp_size=2, fail=True), *data[2:]]
    with open_runtime(model, **settings) as runtime:
        handle, fresh = runtime.build_model(), runtime.build_model()
        for _ in range(2):
            hook = fail_in_layer(handle, 1) if where == "model" else None
            with pytest.raises(ValueError, match="no such advantage"):
                runtime.forward_backward(handle, broken, LOSSES[where])
            if hook is not None:
                hook.remove()
            with pytest.raises(HandleError, match="zero_grad"):
                runtime.forward_backward(handle, data, failing_loss)
            with pytest.raises(HandleError, match="zero_grad"):
                runtime.optimizer_step(handle)
            runtime.forward_backward(handle, data, None, forward_only=True)
            runtime.zero_grad(handle)
        for each in (handle, fresh):
            runtime.forward_backward(each, data, failing_loss)
        return gradients(handle), gradients(fresh)


@pytest.mark.parametrize("where", ["model", "loss", "backward"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"reshard_after_forward": False}, {"param_dtype": "bfloat16", "activation_checkpointing": "full"}],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_pass_that_fails_in_the_middle_leaves_nothing_behind_after_zero_grad(
    ranks: RankPool, untied_model: Path, where: str, settings: dict[str, Any], world_size: int
) -> None:
    for result, expected in ranks.run(failing_pass_job, str(untied_model), where, settings, world_size=world_size):
        assert_equal_tensors(result, expected)


def poisoned_loss(
    model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    loss, metrics = token_loss(model_output, data, dp_group)
    return loss * data.meta["factor"], metrics


def non_finite_job(model: str, factor: float, settings: dict[str, Any]) -> tuple[bool, float, int]:
    """One step with a non-finite gradient on the last rank only, between good ones that must not notice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    split = deal([[index] for index in range(8)], size)[rank]
    with open_runtime(model, **settings) as runtime:
        handle, untouched = runtime.build_model(), runtime.build_model()
        for each in (handle, untouched):
            train(runtime, each, 2)
        runtime.zero_grad(handle)
        last = rank == size - 1
        runtime.forward_backward(handle, micro_batches(split, dp_size=size, factor=factor if last else 1.0), poisoned_loss)
        ok, norm, _ = runtime.optimizer_step(handle)
        version = handle.weight_version
        assert_equal_tensors(weights(handle), weights(untouched))
        assert_equal_tensors(optimizer_state(handle), optimizer_state(untouched))
        assert train(runtime, handle, 2, first_seed=5) == train(runtime, untouched, 2, first_seed=5)
        assert_equal_tensors(weights(handle), weights(untouched))
    return ok, norm, version


@pytest.mark.shows("runtime: a non-finite gradient on any rank skips the step and changes nothing")
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"param_dtype": "bfloat16"}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(
    ranks: RankPool, tied_model: Path, factor: float, settings: dict[str, Any], world_size: int
) -> None:
    for ok, norm, version in ranks.run(non_finite_job, str(tied_model), factor, settings, world_size=world_size):
        assert not ok
        assert not torch.isfinite(torch.tensor(norm))
        assert version == 2


def first_pass_job(model: str) -> None:
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        hook = handle.model.register_forward_pre_hook(_fail, prepend=True)
        with pytest.raises(RuntimeError, match="before the first pass"):
            runtime.forward_backward(handle, micro_batches([[0]], dp_size=2), token_loss)
        hook.remove()
        runtime.zero_grad(handle)
        train(runtime, handle, 1)


def _fail(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise RuntimeError("before the first pass")


def test_an_error_before_the_first_pass_begins_is_the_one_that_is_raised(ranks: RankPool, tied_model: Path) -> None:
    ranks.run(first_pass_job, str(tied_model))
