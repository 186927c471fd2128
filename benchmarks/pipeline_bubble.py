"""The bubble of every pipeline schedule as the executor runs it, and as it is simulated.

Four processes run the real executor over gloo with stages that wait for a fixed time in place of computing, so that they do
not compete for cores: on each rank ``SECONDS`` for the forward pass of a micro-batch, as much for the backward pass for the
inputs and as much for the weights, shared by the rank's stages. Activations are counted as they are kept alive.
``python -m benchmarks.pipeline_bubble`` writes ``results/pipeline_bubble.json``: ``schedules.<name>.<m>`` with the measured
and simulated shares of idle time and ``throughput_over_1f1b``; of several runs, the one with the median makespan.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from benchmarks.report import machine, write_result
from rl_backend.child_process import open_lifeline, tie
from rl_backend.pipeline import SCHEDULES, Action, Costs, Schedule, Span, Timeline, make_schedule, simulate
from rl_backend.pipeline.executor import PipelineExecutor
from rl_backend.primitive.backward import weight_gradient

PP = 4
MICRO_BATCHES = (8, 16)
SECONDS = 0.2
HIDDEN = 1024


class TimedPass(torch.autograd.Function):
    """Waits for ``seconds`` in the forward pass, in the backward pass for the input and in the one for the weight.

    ``keep`` gives what is kept alive from the forward pass to the end of the last.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: float, keep: Callable[[], object]) -> Tensor:
        time.sleep(seconds)
        ctx.weight, ctx.seconds, ctx.kept = weight, seconds, keep()
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        time.sleep(ctx.seconds)
        compute = partial(_wait_for_weight, ctx.seconds, ctx.kept, torch.ones_like(ctx.weight))
        return grad.clone(), weight_gradient(ctx.weight, compute), None, None


def _wait_for_weight(seconds: float, kept: object, gradient: Tensor) -> Tensor:
    """The backward pass for the weight; what waits to call it keeps ``kept`` alive."""
    time.sleep(seconds)
    return gradient


class _Kept:
    """The part of a micro-batch that a stage keeps for its backward pass."""


class TimedStages:
    """The work of one rank's stages.

    Attributes:
        spans: what has run, in seconds of the machine's monotonic clock.
        peak: the most activations that were alive at once.
    """

    def __init__(self, num_stages: int, seconds: float) -> None:
        self.seconds = seconds
        self.spans: list[Span] = []
        self.peak = 0
        self._num_stages = num_stages
        self._alive = 0
        self._weights = [torch.zeros((), requires_grad=True) for _ in range(num_stages)]

    def keep(self) -> _Kept:
        """A new activation."""
        kept = _Kept()
        self._alive += 1
        self.peak = max(self.peak, self._alive)
        weakref.finalize(kept, self._let_go)
        return kept

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        entry = torch.zeros(HIDDEN) if hidden is None else hidden
        output: Tensor = TimedPass.apply(entry, self._weights[stage], self.seconds, self.keep)
        return output.sum() if stage + 1 == self._num_stages else output

    def empty_hidden(self, micro_batch: int) -> Tensor:
        return torch.empty(HIDDEN)

    def after_weights(self, stage: int) -> None:
        pass

    @contextmanager
    def span(self, action: Action) -> Generator[None]:
        start = time.perf_counter()
        yield
        self.spans.append(Span(action, start, time.perf_counter()))

    def _let_go(self) -> None:
        self._alive -= 1


@dataclass(frozen=True)
class Run:
    """One rank's report of one step."""

    spans: tuple[Span, ...]
    peak: int


def run_rank(rank: int, store: str, num_runs: int, results: Any, lines: Sequence[Connection]) -> None:
    """All measurements on one rank; rank 0 puts timelines into ``results``. ``lines`` stay open until its end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PP)
    group = dist.group.WORLD
    assert group is not None, "it was made above"
    _step(make_schedule("zbv", PP, 2), 0.001, group)
    timelines: dict[tuple[str, int], list[Timeline]] = {}
    for _ in range(num_runs):
        for name in SCHEDULES:
            for num_micro_batches in MICRO_BATCHES:
                schedule = make_schedule(name, PP, num_micro_batches)
                run = _step(schedule, SECONDS / schedule.stages_per_rank, group)
                runs: list[Run | None] = [None] * PP
                dist.all_gather_object(runs, run)
                whole = [one for one in runs if one is not None]
                timelines.setdefault((name, num_micro_batches), []).append(
                    Timeline(tuple(one.spans for one in whole), tuple(one.peak for one in whole))
                )
    if rank == 0:
        results.put(timelines)
    dist.barrier()
    dist.destroy_process_group()


def _step(schedule: Schedule, seconds: float, group: dist.ProcessGroup) -> Run:
    stages = TimedStages(schedule.num_stages, seconds)
    dist.barrier()
    PipelineExecutor(schedule, group, stages).run()
    return Run(tuple(stages.spans), stages.peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each schedule and number of micro-batches (default 3)")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        store = str(Path(directory) / "store")
        lines = [stack.enter_context(open_lifeline()) for _ in range(PP)]
        ranks = start_processes(
            run_rank, (store, arguments.runs, results, lines), nprocs=PP, join=False, start_method="spawn"
        )
        assert ranks is not None, "they are not joined yet"
        for pid, line in zip(ranks.pids(), lines, strict=True):
            tie(pid, line)
        timelines = results.get()
        while not ranks.join():
            pass
    facts = {"pp": PP, "seconds_of_a_pass_on_a_rank": SECONDS, "runs": arguments.runs, "schedules": _schedules(timelines)}
    path = write_result("pipeline_bubble", {**facts, "machine": machine()})
    print(f"wrote {path}")


def _schedules(timelines: dict[tuple[str, int], list[Timeline]]) -> dict[str, dict[str, dict[str, Any]]]:
    chosen = {key: sorted(runs, key=lambda run: run.makespan)[(len(runs) - 1) // 2] for key, runs in timelines.items()}
    schedules: dict[str, dict[str, dict[str, Any]]] = {}
    for (name, num_micro_batches), measured in chosen.items():
        schedule = make_schedule(name, PP, num_micro_batches)
        share = SECONDS / schedule.stages_per_rank
        simulated = simulate(schedule, Costs(share, share, share))
        facts = {
            "measured": measured.bubble_makespan,
            "simulated": simulated.bubble_makespan,
            "measured_span": measured.bubble_span,
            "simulated_span": simulated.bubble_span,
            "measured_seconds": measured.makespan,
            "simulated_seconds": simulated.makespan,
            "throughput_over_1f1b": chosen["1f1b", num_micro_batches].makespan / measured.makespan,
            "measured_peak_activations": list(measured.peak_activations),
            "simulated_peak_activations": list(simulated.peak_activations),
        }
        schedules.setdefault(name, {})[str(num_micro_batches)] = facts
        print(
            f"{name:17} m={num_micro_batches:<3} bubble {facts['measured']:6.1%} (simulated {facts['simulated']:6.1%}), "
            f"{facts['throughput_over_1f1b']:.2f}x 1F1B, peak {facts['measured_peak_activations']} "
            f"(simulated {facts['simulated_peak_activations']})"
        )
    return schedules


if __name__ == "__main__":
    main()
