"""Steps of the native runtime with optimizer post-validation and without; a part of ``benchmarks.pipeline_bubble``."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.timed_model import NAME, TimedOptions, write_timed
from rl_backend.contracts import (
    MetricValue,
    ModelOutput,
    NativeConfig,
    OptimizerConfig,
    PackedBatch,
    ParallelConfig,
    RuntimeConfig,
    StepResult,
)
from rl_backend.pipeline import Costs, make_schedule, simulate
from rl_backend.runtime.native import NativeHandle, NativeRuntime

SCHEDULES = ("zb-h2", "zbv")
MICRO_BATCHES = 8
STEPS = 4


class Case(NamedTuple):
    """How the steps of one measurement are taken.

    Attributes:
        clips: all gradients together call for clipping and no rank's alone do, so that every step is taken back.
    """

    schedule: str
    validates: bool
    clips: bool = False


CASES = [case for name in SCHEDULES for case in (Case(name, False), Case(name, True), Case(name, True, clips=True))]


def measure(seconds: float) -> dict[Case, float]:
    """Wall time of ``STEPS`` steps in each case, from the first rank's start to the last one's end.

    Args:
        seconds: of a pass of a micro-batch on a rank.
    """
    with tempfile.TemporaryDirectory() as directory:
        return {case: _steps(case, Path(directory), seconds) for case in CASES}


def facts(times: dict[Case, float], pp: int, seconds: float) -> dict[str, Any]:
    """What the JSON file has."""
    schedules = {}
    for name in SCHEDULES:
        waiting, validated, clipped = (
            times[case] for case in (Case(name, False), Case(name, True), Case(name, True, clips=True))
        )
        share = seconds / make_schedule(name, pp, MICRO_BATCHES).stages_per_rank
        alone = simulate(make_schedule(name, pp, MICRO_BATCHES), Costs(share, share, share))
        # A rank goes on with the next step when its own is done: every step but the last costs the longest span.
        longest = max(own[-1].end - own[0].start for own in alone.spans)
        simulated = STEPS * alone.makespan / ((STEPS - 1) * longest + alone.makespan)
        schedules[name] = {
            "waiting_seconds": waiting,
            "validated_seconds": validated,
            "throughput_over_waiting": waiting / validated,
            "simulated_throughput_over_waiting": simulated,
            "clipped_seconds": clipped,
            "clipped_throughput_over_waiting": waiting / clipped,
        }
        print(
            f"{name:6} {STEPS} steps: post-validation {waiting / validated:.3f}x waiting (simulated {simulated:.3f}x), "
            f"{waiting / clipped:.3f}x where every step is clipped"
        )
    return {"steps": STEPS, "micro_batches": MICRO_BATCHES, "schedules": schedules}


def _steps(case: Case, directory: Path, seconds: float) -> float:
    pp = dist.get_world_size()
    stages_per_rank = make_schedule(case.schedule, pp, MICRO_BATCHES).stages_per_rank
    path = directory / case.schedule
    path.mkdir(exist_ok=True)
    write_timed(path, pp * stages_per_rank)
    backend_cfg = NativeConfig(
        device="cpu",
        model=NAME,
        model_cfg=TimedOptions(seconds=seconds / stages_per_rank),
        parallel=ParallelConfig(pp=pp, vpp=stages_per_rank),
        pipeline_schedule=case.schedule,
        post_validation=case.validates,
        optimizer=OptimizerConfig(lr=1e-3, clip_grad=_clip_grad(stages_per_rank) if case.clips else 1e9),
    )
    runtime = NativeRuntime(RuntimeConfig(hf_path=str(path), backend_cfg=backend_cfg))
    try:
        handle = runtime.build_model()
        batches = [PackedBatch(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))] * MICRO_BATCHES
        _take_step(runtime, handle, batches)
        handle.settle_everywhere()
        dist.barrier()
        start = time.perf_counter()
        results = [_take_step(runtime, handle, batches) for _ in range(STEPS)]
        end = time.perf_counter()
        assert all(result.ok for result in results), "finite gradients"
    finally:
        runtime.close()
    spans: list[Any] = [None] * pp
    dist.all_gather_object(spans, (start, end))
    return float(max(end for _, end in spans) - min(start for start, _ in spans))


def _clip_grad(layers_per_rank: int) -> float:
    """More than the norm of one rank's gradients and less than that of four's."""
    return 1.5 * MICRO_BATCHES * math.sqrt(layers_per_rank)


def _take_step(runtime: NativeRuntime, handle: NativeHandle, batches: list[PackedBatch]) -> StepResult:
    runtime.zero_grad(handle)
    runtime.forward_backward(handle, batches, _loss)
    return runtime.optimizer_step(handle)


def _loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, Mapping[str, MetricValue]]:
    assert model_output.log_probs is not None, "the model gives them"
    return model_output.log_probs.sum(), {}
