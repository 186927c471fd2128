"""Moving parts to host memory and back, on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import HandleError
from tests.support.journeys import journey_job
from tests.support.moe import write_moe
from tests.support.native import deal, micro_batches, open_runtime, token_loss, train
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]


CASES: Mapping[str, tuple[str, str, int, dict[str, Any]]] = {
    "native dp2": ("native", "dense", 2, {"reshard_after_forward": False}),
    "native dp2 in bfloat16": ("native", "dense", 2, {"param_dtype": "bfloat16"}),
    "native pp2": ("native", "dense", 2, {"parallel": {"pp": 2}}),
    "native ep2": ("native", "mixture", 2, {"parallel": {"ep": 2}}),
    "bridge dp2 in bfloat16": ("bridge", "dense", 2, {"param_dtype": "bfloat16"}),
    "bridge tp2": ("bridge", "dense", 2, {"parallel": {"tp": 2}}),
    "bridge pp2 in bfloat16": ("bridge", "dense", 2, {"parallel": {"pp": 2}, "param_dtype": "bfloat16"}),
    "bridge ep2": ("bridge", "mixture", 2, {"parallel": {"ep": 2}}),
}
"""Runtime, model, ranks and settings."""


@pytest.mark.shows(
    "runtime: parameters, gradients and optimizer state move to host memory and back in any order, bit for bit, in both"
)
@pytest.mark.parametrize("case", CASES)
def test_parts_travel_in_any_order_without_changing_a_bit_and_leave_no_memory_behind(
    ranks: RankPool, tied_model: Path, tmp_path: Path, case: str
) -> None:
    backend, family, world_size, settings = CASES[case]
    model = tied_model if family == "dense" else write_moe("qwen3_moe", tmp_path)
    ranks.run(journey_job, backend, str(model), settings, world_size=world_size)


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
