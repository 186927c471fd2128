"""A training group whose only rank is an object of this process, with real models and without Ray, and dies when told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ray import cloudpickle
from ray.exceptions import ActorDiedError

from actors.train import memory_boundary, recovery
from actors.train.context import HandleRef, RankContext
from actors.train.group import TrainGroup
from actors.train.layout import Layout
from actors.train.loss import SentLoss
from actors.train.order import OperationHeader, OperationSequence
from actors.train.outcome import Apart, RankInfo
from actors.train.recovery import Recovery
from actors.train.worker import run
from actors.wire import held_memory
from actors.wire.held_memory import MemoryHolder
from rl_backend.algorithm import sft_loss
from rl_backend.contracts import GroupFailedError, TokenSequence
from rl_backend.contracts.atoms import Operation
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences

DIES = "dies"


class RankHere:
    """The only rank of a group: an operation runs when it is sent. ``dies`` says in which it dies instead."""

    def __init__(self, context: RankContext, dies: Callable[[OperationHeader], bool], number: int = 0) -> None:
        self.context, self.dies, self.number = context, dies, number
        self.members: Any = SimpleNamespace(id=context.group_id, name="ours", workers=[None], kill=lambda: None)
        self.infos = (RankInfo(0, "here", "127.0.0.1", 1),)
        self.sequence = OperationSequence()
        self.driver, self.bounds, self.peak_memory, self.operator = "driver", None, 0, ""
        self.journal: list[Operation] = []
        self.ran: list[tuple[int, str]] = []
        self.is_dead = self.ended = False

    def dispatch(self, name: str, calls: Sequence[bytes], loss: Any = None) -> Any:
        if self.is_dead:
            raise GroupFailedError("rank 0 died between operations")
        self.number += 1
        header = OperationHeader(self.number, name)
        return header, self._send(header, calls, loss)

    def repeat(self, header: OperationHeader, calls: Sequence[bytes], loss: Any, after: int) -> Any:
        return self._send(OperationHeader(header.number, header.name, after=after), calls, loss)

    def take_place_of(self, lost: RankHere, number: int) -> None:
        self.journal, self.number = list(lost.journal), number

    def _send(self, header: OperationHeader, calls: Sequence[bytes], loss: SentLoss | None) -> Any:
        self.is_dead = self.is_dead or self.dies(header)
        if self.is_dead:
            return [(DIES, ActorDiedError())]
        self.sequence.start(header)
        self.context.operation = header.number
        self.ran.append((header.number, header.name))
        answer: Any
        try:
            call = cloudpickle.loads(calls[0])
            pickled: Any = None if loss is None else loss.pickled[0]
            answer = run(self.context, call, None if pickled is None else cloudpickle.loads(pickled))
        except Exception as error:  # noqa: BLE001, as on a rank
            answer = error
        self.sequence.finish(None)
        return [(Apart(answer.value, None), answer.stored) if isinstance(answer, Apart) else (answer, None)]

    def collect(self, title: str, number: int, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        if refs[0] is DIES:
            raise GroupFailedError(f"rank 0 died during {title}; {recovery.AFTERWARDS}", memory="engine 3 GB")
        if isinstance(refs[0], Exception):
            raise refs[0]
        return list(refs)

    def has_answered(self, refs: Sequence[Any]) -> bool:
        return refs[0] is not DIES

    def fail(self, message: str, *, cause: Exception | None = None) -> None:
        raise GroupFailedError(message) from cause

    def ready(self, refs: Sequence[Any]) -> bool:
        return True

    def end(self) -> None:
        self.ended = self.is_dead = True

    def keep(self, operation: Operation) -> None:
        self.journal.append(operation)

    def forget(self, key: int) -> None:
        self.journal = [each for each in self.journal if each.number != key]


_HOLDERS: dict[int, Any] = {}


def _holder(number: int) -> Any:
    return _HOLDERS[number]


class HolderHere:
    """A holder of this process, as an actor's handle; what it is asked is answered at once."""

    def __init__(self, node_id: str) -> None:
        self.node_id, self.holder, self.is_dead = node_id, MemoryHolder(), False

    def __reduce__(self) -> Any:
        # A copy of the handle is of the same holder.
        _HOLDERS[id(self)] = self
        return _holder, (id(self),)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *given: self._ask(name, given))

    def _ask(self, name: str, given: tuple[Any, ...]) -> Any:
        failed = next((each for each in given if isinstance(each, Exception)), None)
        if self.is_dead or failed is not None:
            return failed or ActorDiedError()
        return getattr(self.holder, name)(*given)

    def die(self) -> None:
        self.is_dead = True
        for model in {key.model for key in self.holder._files}:
            self.holder.drop(model, float("inf"))


class _RayHere:
    """Ray, whose references are the results themselves."""

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(each) for each in refs]
        if isinstance(refs, Exception):
            raise refs
        return refs

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return refs, []

    def kill(self, holder: HolderHere) -> None:
        holder.die()

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")


def use_ranks_here(
    monkeypatch: pytest.MonkeyPatch, nodes: Sequence[str] = ("here",)
) -> tuple[list[RankInfo], list[HolderHere]]:
    """Ray is not started; returns the ranks that are ended and the holders that are started."""
    ended: list[RankInfo] = []
    holders: list[HolderHere] = []

    def start_holder(node_id: str) -> HolderHere:
        holders.append(HolderHere(node_id))
        return holders[-1]

    monkeypatch.setattr("actors.train.loss.ray.put", lambda loss: loss)
    monkeypatch.setattr(recovery, "end_processes", ended.extend)
    monkeypatch.setattr(memory_boundary, "end_processes", ended.extend)
    monkeypatch.setattr(recovery, "_PAUSE_SECONDS", 0.0)
    for name, value in (
        ("ray", _RayHere()),
        ("start_holder", start_holder),
        ("living_nodes", lambda: [{"NodeID": node} for node in nodes]),
        ("ray_is_usable", lambda: True),
    ):
        monkeypatch.setattr(memory_boundary, name, value)
    monkeypatch.setattr(held_memory, "ray", _RayHere())
    return ended, holders


@contextmanager
def group_that_recovers(
    model: Path, *deaths: int, in_memory: bool = False, **settings: Any
) -> Iterator[tuple[TrainGroup, list[RankHere]]]:
    """Each number is an operation in which the rank of then dies, in this order; settings are of the runtime."""
    left, started = list(deaths), []
    with ExitStack() as stack:
        stack.enter_context(patch("actors.train.loss.ray.put", lambda loss: loss))  # Ray would start
        stack.enter_context(patch.object(recovery, "_PAUSE_SECONDS", 0.0))

        def dies(header: OperationHeader) -> bool:
            if left and header.number == left[0]:
                return bool(left.pop(0))
            return False

        def start(**_: Any) -> Any:
            runtime = stack.enter_context(open_runtime(model, **settings))
            started.append(RankHere(RankContext(runtime, "group", 0, 1), dies))
            return started[-1]

        first = start()
        config = first.context.runtime.config
        recovered = Recovery(first, start, Layout(config, 1), in_memory=in_memory)
        stack.callback(recovered.kill)
        yield TrainGroup.__new__(TrainGroup)._over(config, recovered), started


def sequences(step: int) -> list[TokenSequence]:
    rows = random_token_sequences((9, 5, 12), VOCAB_SIZE, seed=step)
    return [row.with_fields(token_fields={"loss_mask": (torch.arange(len(row)) < len(row) - 1).float()}) for row in rows]


def train_step(group: TrainGroup, handle: HandleRef, step: int) -> list[Any]:
    """What one step gives, of which nothing is waited for before all is asked."""
    group.zero_grad.submit(handle)
    passed = group.forward_backward.submit(handle, sequences(step), sft_loss)
    stepped = group.optimizer_step.submit(handle)
    group.lr_scheduler_step.submit(handle)
    return [passed.result().losses, stepped.result()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
