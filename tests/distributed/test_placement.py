"""Moving parts to host memory and back, on several ranks."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import HandleError
from rl_backend.runtime.native import NativeHandle, NativeRuntime
from tests.support.native import (
    assert_equal_tensors,
    deal,
    micro_batches,
    open_runtime,
    optimizer_state,
    token_loss,
    train,
    weights,
)
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]


def move(runtime: NativeRuntime, handle: NativeHandle, device: Any, parts: tuple[str, ...]) -> None:
    for part in parts:
        runtime.to(handle, device, **{name: name == part for name in ("model", "optimizer", "grad")})


def moved_training_job(model: str, settings: dict[str, Any]) -> None:
    """Trains two handles, one of which travels in every order between all atoms."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = micro_batches(deal(SPLIT, size)[rank], dp_size=size)
    with open_runtime(model, **settings) as runtime:
        moved, still = runtime.build_model(), runtime.build_model()
        orders = list(permutations(("model", "optimizer", "grad")))
        for leaving, returning in zip(orders, reversed(orders), strict=True):
            for handle in (moved, still):
                runtime.zero_grad(handle)
                runtime.forward_backward(handle, data, token_loss)
                runtime.forward_backward(handle, data, None, forward_only=True)
            move(runtime, moved, "cpu", leaving)
            move(runtime, moved, "device", returning)
            results = [runtime.optimizer_step(handle) for handle in (moved, still)]
            assert results[0] == results[1]
            move(runtime, moved, "cpu", ("optimizer", "model"))
            move(runtime, moved, "device", ("model",))
            outputs = [runtime.forward_backward(handle, data, token_loss).losses for handle in (moved, still)]
            assert outputs[0] == outputs[1]
            move(runtime, moved, "device", ("optimizer",))
        assert_equal_tensors(weights(moved), weights(still))
        assert_equal_tensors(optimizer_state(moved), optimizer_state(still))


@pytest.mark.shows(
    "runtime: parameters, gradients and optimizer state move to host memory and back, each on its own, bit for bit"
)
@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}, {"param_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parts_travel_in_any_order_without_changing_a_bit(
    ranks: RankPool, tied_model: Path, settings: dict[str, Any], world_size: int
) -> None:
    ranks.run(moved_training_job, str(tied_model), settings, world_size=world_size)


def stale_gather_job(model: str, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probs after a step, with and without a forward-only pass between the backward pass and the step."""
    rank = dist.get_rank()
    data = micro_batches(deal(SPLIT, 2)[rank], dp_size=2)
    log_probs = []
    with open_runtime(model, **settings) as runtime:
        for look_before_step in (True, False):
            handle = runtime.build_model()
            runtime.forward_backward(handle, data, token_loss)
            if look_before_step:
                runtime.forward_backward(handle, data, None, forward_only=True)
            assert runtime.optimizer_step(handle).ok
            log_probs.append(runtime.forward_backward(handle, data, None, forward_only=True).output("log_probs")[0])
    return log_probs[0], log_probs[1]


@pytest.mark.parametrize("reshard", [True, False])
def test_a_forward_pass_before_the_step_does_not_leave_old_weights_gathered(
    ranks: RankPool, tied_model: Path, reshard: bool
) -> None:
    for looked, expected in ranks.run(stale_gather_job, str(tied_model), {"reshard_after_forward": reshard}):
        assert looked.equal(expected)


def away_job(model: str) -> None:
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1)
        runtime.to(handle, "cpu", model=True, optimizer=False, grad=False)
        with pytest.raises(HandleError, match="model is in host memory"):
            runtime.export_weights(handle)


def test_weights_in_host_memory_are_not_exported(ranks: RankPool, tied_model: Path) -> None:
    ranks.run(away_job, str(tied_model))
