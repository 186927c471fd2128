"""Megatron's optimizer: a gradient that is not finite on one rank changes nothing on any, and every option arrives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import OptimizerConfig
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from tests.support.bridge_runs import open_bridge, poisoned_loss, share, state
from tests.support.bridge_state import bridge_data, exported
from tests.support.matrix import sampled
from tests.support.moe import write_moe
from tests.support.native import assert_near, micro_batches, token_loss
from tests.support.rank_pool import RankPool


def poison_infinite(handle: BridgeHandle) -> None:
    """Every gradient of this rank is infinite, and none is NaN; the signs are those that a sum over ranks cancels."""
    for chunk in handle.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            buffer.grad_data.fill_(math.inf if dist.get_rank() == 0 else -math.inf)


def bad_rank_job(
    model: str, parallel: Mapping[str, int], param_dtype: str, bad_dp_rank: int, infinite: bool = False
) -> tuple[bool, float, int, list[str], bool]:
    """A good step, one with a bad data-parallel rank, a good one; what changed in the second, and whether the third ran."""
    optimizer = OptimizerConfig(lr=1e-3, log_num_zeros_in_grad=True)
    with open_bridge(model, parallel, param_dtype=param_dtype, optimizer=optimizer) as runtime:
        handle = runtime.build_model()
        size = handle.data_parallel_size

        def step(seed: int, *, bad: bool) -> tuple[bool, float, int | None]:
            runtime.zero_grad(handle)
            poisoned = bad and handle.data_parallel_rank == bad_dp_rank
            loss = poisoned_loss if poisoned and not infinite else token_loss
            runtime.forward_backward(handle, micro_batches(share(handle), dp_size=size, seed=seed), loss)
            if poisoned and infinite:
                poison_infinite(handle)
            return runtime.optimizer_step(handle)

        assert step(0, bad=False)[0]
        before = state(handle)
        ok, norm, _ = step(1, bad=True)
        after = state(handle)
        version = handle.weight_version
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        runs_on, next_norm, zeros = step(2, bad=False)
        assert zeros is not None
    return ok, norm, version, changed, runs_on and math.isfinite(next_norm)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixture"))


@pytest.mark.shows(
    "bridge: a non-finite gradient on one rank changes no parameter, moment or step count, in float32 and bf16"
)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}], ids=["dp2", "tp2", "pp2"])
def test_a_bad_rank_stops_the_step_of_all(
    ranks: RankPool, tied_model: Path, parallel: dict[str, int], param_dtype: str
) -> None:
    bad = 1 if not parallel else 0
    for ok, norm, version, changed, runs_on in ranks.run(bad_rank_job, str(tied_model), parallel, param_dtype, bad):
        assert not ok
        assert not math.isfinite(norm)
        assert version == 1
        assert changed == []
        assert runs_on


@pytest.mark.parametrize(
    ("parallel", "param_dtype"), [({}, "float32"), ({"tp": 2}, "bfloat16"), ({"pp": 2}, "float32")], ids=str
)
def test_an_infinite_gradient_stops_the_step_of_all(
    ranks: RankPool, tied_model: Path, parallel: dict[str, int], param_dtype: str
) -> None:
    bad = 1 if not parallel else 0
    for ok, norm, version, changed, runs_on in ranks.run(bad_rank_job, str(tied_model), parallel, param_dtype, bad, True):
        assert not ok
        assert norm == math.inf
        assert version == 1
        assert changed == []
        assert runs_on


@pytest.mark.parametrize("param_dtype", sampled(["float32", "bfloat16"], "float32"))
def test_a_bad_rank_of_an_expert_parallel_group_stops_the_step_of_all(
    ranks: RankPool, mixture: Path, param_dtype: str
) -> None:
    for ok, norm, version, changed, runs_on in ranks.run(bad_rank_job, str(mixture), {"ep": 2}, param_dtype, 1):
        assert not ok
        assert not math.isfinite(norm)
        assert version == 1
        assert changed == []
        assert runs_on


def clipped_job(model: str, clip_grad: float) -> list[float]:
    """Norms of three steps."""
    with open_bridge(model, optimizer=OptimizerConfig(lr=1e-2, clip_grad=clip_grad)) as runtime:
        handle = runtime.build_model()
        norms = []
        for seed in range(3):
            runtime.zero_grad(handle)
            runtime.forward_backward(
                handle, micro_batches(share(handle), dp_size=dist.get_world_size(), seed=seed), token_loss
            )
            norms.append(runtime.optimizer_step(handle).grad_norm)
        return norms


def test_clipping_can_be_switched_off(ranks: RankPool, tied_model: Path) -> None:
    clipped, free = (ranks.run(clipped_job, str(tied_model), limit, world_size=2)[0] for limit in (0.5, 0.0))
    assert clipped[0] == free[0]
    assert clipped[2] != free[2]


def adam_job(model: str) -> list[dict[str, object]]:
    """What every group of parameters has of the configuration."""
    config = OptimizerConfig(lr=1e-2, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.3, lr_warmup_steps=4)
    with open_bridge(model, optimizer=config) as runtime:
        handle = runtime.build_model()
        assert handle.optimizer is not None
        rates = [handle.optimizer.learning_rate, *(runtime.lr_scheduler_step(handle) for _ in range(4))]
        assert rates == pytest.approx([0.0, 2.5e-3, 5e-3, 7.5e-3, 1e-2])
        found = handle.optimizer.param_groups
        return [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in found if group["params"]]


def test_betas_epsilon_decay_and_warm_up_reach_megatrons_adam(ranks: RankPool, tied_model: Path) -> None:
    (groups,) = ranks.run(adam_job, str(tied_model), world_size=1)
    assert [(group["betas"], group["eps"]) for group in groups] == [((0.8, 0.7), 1e-3)] * len(groups)
    assert sorted({group["weight_decay"] for group in groups}) == [0.0, 0.3]


def overlapped_job(
    model: str, parallel: Mapping[str, int], ddp: Mapping[str, Any], between: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of three steps and the weights after them; every backward pass is followed by something that gathers weights."""
    with open_bridge(model, parallel, override_ddp_config=dict(ddp)) as runtime:
        handle = runtime.build_model()

        def fail(*_: object) -> None:
            raise RuntimeError("on purpose")

        norms = []
        for seed in range(3):
            runtime.zero_grad(handle)
            data = bridge_data(runtime, seed)
            runtime.forward_backward(handle, data, token_loss)
            if between == "export":
                exported(runtime, handle)
            elif between == "forward-only":
                runtime.forward_backward(handle, data, None, forward_only=True)
            else:
                layer = next(each for name, each in handle.models[0].named_modules() if name.endswith("layers.1"))
                removable = layer.register_forward_pre_hook(fail)
                with pytest.raises(RuntimeError, match="on purpose"):
                    runtime.forward_backward(handle, data, None, forward_only=True)
                removable.remove()
            norms.append(runtime.optimizer_step(handle).grad_norm)
        return norms, exported(runtime, handle)


@pytest.mark.shows("bridge: with overlap_param_gather a pass has the weights of the last step, whatever came before that")
@pytest.mark.parametrize("parallel", [{}, {"ep": 2}], ids=["dp2", "ep2"])
@pytest.mark.parametrize(
    "between", sampled(["forward-only", "forward-only-that-fails", "export"], "forward-only-that-fails", "export")
)
def test_gathers_that_overlap_come_after_the_step(
    ranks: RankPool, mixture: Path, parallel: dict[str, int], between: str
) -> None:
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000}
    expected, found = (ranks.run(overlapped_job, str(mixture), parallel, ddp, between) for ddp in ({}, overlap))
    for (norms, weights), (other_norms, other_weights) in zip(expected, found, strict=True):
        assert other_norms == pytest.approx(norms, rel=1e-6)
        assert_near(other_weights, weights)
