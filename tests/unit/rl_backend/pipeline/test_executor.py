"""A pipeline's ranks, each in a thread of its own, against the whole model in one pass."""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.pipeline import COMPUTATIONS, Action, Schedule, make_schedule
from rl_backend.pipeline import executor as module
from rl_backend.pipeline.executor import PipelineExecutor
from rl_backend.primitive.backward import put_off_in_linear_layers

WIDTH, SECONDS = 3, 10.0
LENGTHS = (2, 5, 1, 3, 4, 2, 1, 6)
"""Of micro-batches, no two neighbours alike."""


class Network:
    """Sends and receives between threads: in one direction between two ranks the n-th of both meet, in whichever order they
    are waited for.
    """

    def __init__(self) -> None:
        self.carried: defaultdict[tuple[int, int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self.posted: Counter[tuple[str, int, int]] = Counter()
        self.lock = threading.Lock()

    def isend(self, tensor: Tensor, group: Any, group_dst: int) -> Any:
        assert tensor.is_contiguous(), "as gloo and NCCL demand"
        self._next("send", group.rank(), group_dst).put(tensor)
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: False)

    def irecv(self, tensor: Tensor, group: Any, group_src: int) -> Any:
        source = self._next("receive", group_src, group.rank())

        def wait() -> None:
            sent = source.get(timeout=SECONDS)
            assert sent.shape == tensor.shape
            tensor.copy_(sent)

        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    def _next(self, end: str, source: int, target: int) -> queue.Queue[Tensor]:
        with self.lock:
            number = self.posted[end, source, target]
            self.posted[end, source, target] += 1
            return self.carried[source, target, number]

    @property
    def is_empty(self) -> bool:
        return all(each.empty() for each in self.carried.values())


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(module.dist, "isend", network.isend)
    monkeypatch.setattr(module.dist, "irecv", network.irecv)
    return network


@pytest.fixture(autouse=True)
def one_backward_pass_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What puts gradients off is a process's, and here ranks are threads of one."""
    lock, backward, put_off = threading.RLock(), torch.autograd.backward, module.put_off_weight_gradients

    @contextmanager
    def put_off_alone() -> Iterator[Any]:
        with lock, put_off() as gradients:
            yield gradients

    def backward_alone(*arguments: Any, **named: Any) -> None:
        with lock:
            backward(*arguments, **named)

    monkeypatch.setattr(module, "put_off_weight_gradients", put_off_alone)
    monkeypatch.setattr(torch.autograd, "backward", backward_alone)


def make_stages(count: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    stages: list[nn.Module] = []
    for _ in range(count):
        linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
            linear.bias.copy_(torch.randn(WIDTH, generator=generator, dtype=torch.float64))
        stages.append(linear)
    return stages


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, WIDTH, generator=generator, dtype=torch.float64) for length in LENGTHS]


class Stages:
    """The stages of a rank, which keep account of what they are asked for."""

    def __init__(self, schedule: Schedule, rank: int, stages: Sequence[nn.Module], data: Sequence[Tensor]) -> None:
        self.schedule, self.stages, self.data = schedule, stages, data
        self.own = schedule.stages_of(rank)
        self.spans: list[Action] = []
        self.weights: list[int] = []
        self.losses: dict[int, float] = {}
        self.in_span = False
        for stage in self.own:
            put_off_in_linear_layers(stages[stage])

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor | None:
        assert self.in_span and stage in self.own and (hidden is None) == (stage == 0)
        x = self.data[micro_batch] if hidden is None else hidden
        assert hidden is None or hidden.requires_grad is not self.schedule.forward_only
        output: Tensor = self.stages[stage](x).tanh()
        if stage + 1 < self.schedule.num_stages:
            # It lies transposed in memory.
            return output.t().contiguous().t()
        loss = output.square().sum() * (micro_batch + 1)
        self.losses[micro_batch] = loss.item()
        return None if self.schedule.forward_only else loss

    def empty_hidden(self, micro_batch: int) -> Tensor:
        return torch.full_like(self.data[micro_batch], torch.nan)

    def after_weights(self, stage: int) -> None:
        self.weights.append(stage)

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        self.spans.append(action)
        self.in_span = True
        yield
        self.in_span = False


def on_ranks(pp_size: int, run: Any) -> list[Any]:
    """What ``run(rank, group)`` gives in a thread for each rank; raises what one raised."""
    found: dict[int, Any] = {}
    failed: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            found[rank] = run(rank, SimpleNamespace(rank=lambda: rank, size=lambda: pp_size))
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            failed.append(error)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(pp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 5)
    if failed:
        raise failed[0]
    return [found[rank] for rank in range(pp_size)]


def gradients(stages: Sequence[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for stage in stages for parameter in stage.parameters()]


def expected(count: int, data: Sequence[Tensor]) -> tuple[list[float], list[Tensor | None]]:
    stages, losses = make_stages(count), []
    for index, x in enumerate(data):
        for stage in stages:
            x = stage(x).tanh()
        losses.append(x.square().sum() * (index + 1))
    torch.stack(losses).sum().backward()
    return [loss.item() for loss in losses], gradients(stages)


CASES = [
    ("1f1b", 1, 3),
    ("1f1b", 3, 5),
    ("interleaved-1f1b", 2, 6),
    ("zb-h1", 3, 4),
    ("zb-h2", 2, 5),
    ("zbv", 2, 5),
    ("dualpipev", 2, 8),
]


@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward only"])
@pytest.mark.parametrize(("name", "pp_size", "count"), CASES)
def test_a_pipeline_computes_what_the_whole_model_does(
    network: Network, name: str, pp_size: int, count: int, forward_only: bool
) -> None:
    schedule = make_schedule(name, pp_size, count, forward_only=forward_only)
    data = inputs()[:count]
    stages = make_stages(schedule.num_stages)

    def run(rank: int, group: Any) -> tuple[PipelineExecutor, Stages]:
        work = Stages(schedule, rank, stages, data)
        executor = PipelineExecutor(schedule, group, work)
        executor.run()
        return executor, work

    found = on_ranks(pp_size, run)
    losses, whole = expected(schedule.num_stages, data)
    of_last = {index: loss for _, work in found for index, loss in work.losses.items()}
    assert [of_last[index] for index in range(count)] == pytest.approx(losses)
    for (executor, work), own, peak in zip(found, schedule.actions, schedule.peak_activations, strict=True):
        assert work.spans == [action for action in own if action.kind in COMPUTATIONS]
        assert work.weights == [action.stage for action in own if action.kind.value == "W"]
        assert executor.peak_activations == peak
    for mine, other in zip(gradients(stages), whole, strict=True):
        if forward_only:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other)
    assert network.is_empty
