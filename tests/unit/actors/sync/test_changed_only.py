"""Pushes of what changed, by ranks and receivers of engines that are joined by queues: what is sent, and what doubts do."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from actors.rollout.config import RolloutConfig
from actors.rollout.engine import weights as receiver_module
from actors.rollout.engine.in_process import VllmInProcess
from actors.rollout.engine.weights import WeightReceiver
from actors.sync import staged_transports as staged_module
from actors.sync.push import WeightSync
from actors.sync.report import PushClock
from actors.sync.staged_transports import PushPlan
from actors.train.context import HandleRef
from actors.wire.segment import Segment, SharedSegment
from rl_backend.contracts import (
    ConfigError,
    RLBackendError,
    TensorInfo,
    TensorPart,
    WeightCheckError,
    WeightManifest,
    WeightShard,
)
from rl_backend.weights.inspection import same_bytes
from rl_backend.weights.staging import ExpectedWeights, plan_layout, read_tensor, write_tensors

DTYPE = torch.bfloat16
SHAPES = {"rows": (40, 30), "columns": (64, 50), "norm": (7,)}
INFOS = tuple(TensorInfo.of(name, shape, DTYPE) for name, shape in SHAPES.items())
ELEMENTS = 40 * 30 + 64 * 50 + 7
# Rows of one tensor and columns of another, whose places in memory have gaps; the third is one rank's.
BOXES = {
    "rows": [(0, (0, 0), (25, 30)), (1, (25, 0), (15, 30))],
    "columns": [(0, (0, 0), (64, 20)), (1, (0, 20), (64, 30))],
    "norm": [(1, (0,), (7,))],
}
PARTS = tuple(
    TensorPart.of(name, shape, DTYPE, whole=SHAPES[name], start=start, rank=rank)
    for name, boxes in BOXES.items()
    for rank, start, shape in boxes
)


class Rank:
    """A rank that holds its rectangles of the weights, which it exports as views of one memory, as parameters are."""

    def __init__(self, rank: int, weights: dict[str, Tensor]) -> None:
        self.rank, self.weights = rank, weights
        self.state: dict[str, Any] = {}
        self.runtime = self

    def handle(self, ref: Any) -> Any:
        return ref

    def export_shards(self, handle: Any, *, dtype: torch.dtype, held: bool) -> Iterator[WeightShard]:
        assert held
        for part in PARTS:
            if part.rank == self.rank:
                yield WeightShard(part.name, part.whole, part.start, self.weights[part.name][part.region])

    def export_weights(self, handle: Any, *, dtype: torch.dtype, byte_budget: int | None) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


class Ranks:
    def __init__(self, weights: dict[str, Tensor], number: int = 2) -> None:
        self.ranks = [Rank(rank, weights) for rank in range(number)]

    def run_on_ranks(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [function(rank, *args, **kwargs) for rank in self.ranks]

    def copies(self) -> dict[str, Tensor]:
        connections = [connection for rank in self.ranks for connection in rank.state.values()]
        return {str(info): copy for connection in connections for info, copy in connection.copies.items()}


class Vllm:
    """Loads nothing."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: True


class Queues:
    """Stands for gloo: what a rank broadcasts waits for each engine."""

    sent: ClassVar[dict[tuple[str, int], deque[Tensor]]] = {}
    bytes = 0

    def __init__(self, address: Any, place: int) -> None:
        self._name, self._size, self._place = address.rendezvous, address.size, place
        for engine in range(1, self._size):
            Queues.sent.setdefault((self._name, engine), deque())

    def broadcast(self, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        if self._place:
            waiting = Queues.sent[self._name, self._place]
            if not waiting:
                raise RuntimeError("the sender left")
            received = waiting.popleft()
            tensor.view(-1).view(torch.uint8).copy_(received.view(-1).view(torch.uint8))
            return
        Queues.bytes += tensor.nbytes
        for engine in range(1, self._size):
            Queues.sent[self._name, engine].append(tensor.clone())

    def close(self) -> None: ...


class Point:
    number = 0

    def __init__(self, address: str, timeout: Any) -> None:
        Point.number += 1
        self.rendezvous = f"rendezvous {Point.number}"

    def close(self) -> None: ...


def identity(answer: Any) -> Any:
    return answer


class Engines:
    """Receivers of engines, each of a process of its own as far as its number says."""

    config = SimpleNamespace(sampling_timeout=5.0, call_timeout=5.0, tensor_parallel=1)

    def __init__(self, infos: tuple[TensorInfo, ...], *numbers: int) -> None:
        self.expected = ExpectedWeights({info.name: info for info in infos})
        self.infos: dict[int, Any] = {}
        self.receivers: dict[int, WeightReceiver] = {}
        for number in numbers:
            self.start(number, pid=number)

    def start(self, number: int, pid: int) -> None:
        vllm = VllmInProcess(RolloutConfig(model_path="x"), number, "cpu")
        vllm.llm, vllm.expected = Vllm(), self.expected
        self.infos[number] = SimpleNamespace(pid=pid, node_ip="ip")
        self.receivers[number] = WeightReceiver(vllm, lambda: None)

    @property
    def engines(self) -> tuple[int, ...]:
        return tuple(self.receivers)

    def start_call(self, method: str, *args: Any, each: Any = None) -> dict[int, Callable[[], Any]]:
        def ask(engine: int) -> Callable[[], Any]:
            def answer() -> Any:
                try:
                    return getattr(self.receivers[engine], method)(*args, *(each(engine) if each else ()))
                except RLBackendError as error:
                    return error

            return answer

        asked = {engine: ask(engine) for engine in self.engines}
        if method == "receive":  # what it waits for is sent after this
            return asked
        return {engine: partial(identity, answer()) for engine, answer in asked.items()}

    def gather(self, calls: dict[int, Callable[[], Any]], timeout: float = 600.0) -> dict[int, Any]:
        return {engine: answer() for engine, answer in calls.items()}

    def call(self, method: str, *args: Any, each: Any = None, timeout: float = 600.0) -> dict[int, Any]:
        return self.gather(self.start_call(method, *args, each=each))

    def note(self, engine: int, outcome: Any) -> None: ...

    def have_weights(self, engines: Iterable[int]) -> None: ...

    @contextmanager
    def updating(self) -> Iterator[None]:
        yield

    def segment(self, engine: int) -> SharedSegment:
        segment = self.receivers[engine]._own_segment
        assert segment is not None
        return segment


class Pushes:
    """A trainer of two ranks, engines 1 and 4, and a sync that sends what changed."""

    def __init__(self, *, parts: tuple[TensorPart, ...] = PARTS) -> None:
        torch.manual_seed(0)
        self.weights = {name: torch.randn(shape).to(DTYPE) for name, shape in SHAPES.items()}
        self.ranks: Any = Ranks(self.weights)
        self.engines: Any = Engines(INFOS, 1, 4)
        rollout: Any = SimpleNamespace(
            lora=SimpleNamespace(base_changed=lambda merged: None), attach_weight_sync=lambda: None
        )
        self.sync = WeightSync(self.ranks, rollout, transport="gloo", changed_only=True)
        self.plan = PushPlan("key", None, "bfloat16", None, 0, INFOS, "node", "host", parts=parts)

    def push(self) -> PushClock:
        """Pushes the next version, after which every engine has its bits."""
        clock = PushClock()
        self.plan = replace(self.plan, version=self.plan.version + 1)
        self.sync._ranks = self.ranks
        before = Queues.bytes
        transport: Any = self.sync._transport
        assert self.sync._push_staged(transport, self.plan, self.engines, clock) == self.engines.engines
        assert Queues.bytes - before >= sum(clock.sent)
        for engine in self.engines.engines:
            self.require_equal(engine)
        return clock

    def require_equal(self, engine: int) -> None:
        buffer = self.engines.segment(engine).buffer
        layout, _ = plan_layout(self.plan.infos)
        wrong = [info.name for info in layout if not same_bytes(read_tensor(buffer, info), self.weights[info.name])]
        assert not wrong
        assert self.engines.receivers[engine]._vllm.serving.version == self.plan.version

    def change(self, number: int = 5) -> int:
        """Changes so many elements of each tensor, in place."""
        for tensor in self.weights.values():
            tensor.view(-1)[torch.randperm(tensor.numel())[:number]] += 1.0
        return number * len(self.weights)


@pytest.fixture(autouse=True)
def _queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_module, "GlooGroup", Queues)
    monkeypatch.setattr(receiver_module, "GlooGroup", Queues)
    monkeypatch.setattr(staged_module, "RendezvousPoint", Point)
    monkeypatch.setattr(staged_module, "node_address", lambda: "ip")


@pytest.fixture
def pushes() -> Iterator[Pushes]:
    made = Pushes()
    yield made
    for receiver in made.engines.receivers.values():
        receiver.close()


@pytest.mark.shows("weight sync: what changed since the push before is sent alone, and every engine has the trainer's bits")
@pytest.mark.parametrize("parts", [PARTS, ()], ids=["rectangles", "one source"])
def test_after_the_first_push_only_what_changed_is_sent(parts: tuple[TensorPart, ...]) -> None:
    pushes = Pushes(parts=parts)
    first = pushes.push()
    assert first.changed is None and sum(first.sent) == pushes.plan.nbytes
    for step in range(3):
        changed = pushes.change()
        clock = pushes.push()
        assert clock.changed == changed
        # A table of 24 bytes for each piece, and at most four bytes for an element.
        assert sum(clock.sent) <= 24 * len(parts or INFOS) + 4 * changed
        assert all(clock.sent) if parts else not any(clock.sent[1:]), step
    unchanged = pushes.push()
    assert unchanged.changed == 0 and sum(unchanged.sent) == 24 * len(parts or INFOS)
    pushes.weights["columns"].neg_()
    most = pushes.push()
    assert most.changed == 64 * 50 and sum(most.sent) == 64 * 50 * 2 + 24 * len(parts or INFOS), "all of it is smaller"
    copies = pushes.ranks.copies()
    assert sum(copy.nbytes for copy in copies.values()) == pushes.plan.nbytes
    pushes.sync._transport.close(pushes.ranks, pushes.engines)  # type: ignore[union-attr]
    assert not pushes.ranks.copies() and not any(r._own_segment for r in pushes.engines.receivers.values())


def test_zeros_change_their_sign(pushes: Pushes) -> None:
    pushes.weights["rows"][3, 3:6] = 0.0
    pushes.push()
    pushes.weights["rows"][3, 4] = -0.0
    assert pushes.push().changed == 1


def test_values_that_are_not_finite_are_refused_and_what_follows_is_sent_whole(pushes: Pushes) -> None:
    pushes.push()
    served = pushes.plan.version
    pushes.weights["norm"][2] = torch.nan
    with pytest.raises(WeightCheckError, match="hold NaN or infinity"):
        pushes.push()
    assert {receiver._vllm.serving.version for receiver in pushes.engines.receivers.values()} == {served}
    pushes.weights["norm"][2] = 0.5
    assert pushes.push().changed is None
    pushes.change()
    assert pushes.push().changed is not None


def replaced_engine(pushes: Pushes) -> None:
    pushes.engines.receivers[4].close()
    pushes.engines.start(4, pid=40)


def lost_segment(pushes: Pushes) -> None:
    pushes.engines.receivers[1].close()


def another_syncs_push(pushes: Pushes) -> None:
    """Into the segment of one engine."""
    other: Any = Ranks({name: tensor + 1 for name, tensor in pushes.weights.items()})
    transport: Any = staged_module.GlooTransport(changed_only=True)
    only = pushes.engines.receivers.pop(4)
    transport.stage(replace(pushes.plan, key="other"), other, pushes.engines)
    pushes.engines.receivers[4] = only


def replaced_ranks(pushes: Pushes) -> None:
    pushes.ranks = Ranks(pushes.weights)


def other_rectangles(pushes: Pushes) -> None:
    pushes.plan = replace(pushes.plan, parts=())


def refused_push(pushes: Pushes) -> None:
    pushes.weights["norm"][0], before = torch.inf, pushes.weights["norm"][0].clone()
    with pytest.raises(WeightCheckError):
        pushes.push()
    pushes.weights["norm"][0] = before


def connection_that_broke(pushes: Pushes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Queues, "broadcast", lambda queue, tensor: (_ for _ in ()).throw(RuntimeError("left")))
        with pytest.raises(RLBackendError, match="left"):
            pushes.push()


DOUBTS = [
    *(replaced_engine, lost_segment, another_syncs_push, replaced_ranks, other_rectangles, refused_push),
    connection_that_broke,
]


@pytest.mark.parametrize("doubt", DOUBTS, ids=lambda doubt: doubt.__name__)
def test_where_an_engine_or_a_rank_may_have_something_else_all_is_sent(
    pushes: Pushes, doubt: Callable[[Pushes], None], caplog: pytest.LogCaptureFixture
) -> None:
    pushes.push()
    pushes.change()
    pushes.push()
    doubt(pushes)
    pushes.change()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        clock = pushes.push()
    assert clock.changed is None and sum(clock.sent) == pushes.plan.nbytes
    assert not caplog.records, "it was known before anything was sent"
    changed = pushes.change()
    assert pushes.push().changed == changed


def stale_copy(pushes: Pushes) -> None:
    """The rank believes that engines have a value that it never sent."""
    copy = pushes.ranks.copies()["columns[0:64, 0:20]"]
    copy[7, 7] = pushes.weights["columns"][7, 7] = 9.0


def flipped_bit(pushes: Pushes) -> None:
    pushes.engines.segment(4).buffer[11] ^= 1


@pytest.mark.parametrize("damage", [stale_copy, flipped_bit], ids=lambda damage: damage.__name__)
def test_a_stale_element_is_found_by_the_digest_of_the_whole_and_all_is_sent(
    pushes: Pushes, damage: Callable[[Pushes], None], caplog: pytest.LogCaptureFixture
) -> None:
    pushes.push()
    pushes.change()
    pushes.push()
    damage(pushes)
    with caplog.at_level(logging.WARNING):
        clock = pushes.push()
    assert "all weights are sent" in caplog.text and "differ from the manifest's digests" in caplog.text
    assert clock.changed is None and sum(clock.sent) == pushes.plan.nbytes
    changed = pushes.change()
    assert pushes.push().changed == changed


@pytest.mark.parametrize("fault", ["an offset", "a number"])
def test_a_patch_that_was_damaged_on_its_way_is_found_by_the_digest_and_all_is_sent(
    pushes: Pushes, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pushes.push()
    pushes.change()
    real = receiver_module.apply_patch

    def damaged(place: Tensor, patch: Any) -> None:
        if fault == "an offset" and len(patch.payload):
            patch.payload[0] += 1
        if fault == "a number":
            patch.table[0, 0] += 1
        real(place, patch)

    monkeypatch.setattr(receiver_module, "apply_patch", damaged)
    with caplog.at_level(logging.WARNING):
        assert pushes.push().changed is None
    assert "all weights are sent" in caplog.text


def test_an_engine_holds_a_push_from_its_verification_to_the_next_byte_it_receives(pushes: Pushes) -> None:
    pushes.push()
    receiver: WeightReceiver = pushes.engines.receivers[1]
    held = receiver.held_push()
    assert held and held == pushes.engines.receivers[4].held_push()
    # A push through shared memory leaves the own segment as it is.
    layout, nbytes = plan_layout(INFOS)
    memory = SharedSegment(nbytes)
    manifest = WeightManifest(version=9, tensors=write_tensors(memory.buffer, layout, pushes.weights.items()))
    receiver.verify(manifest, Segment(str(memory.path), nbytes), "through memory")
    memory.close()
    assert receiver.held_push() == held
    with pytest.raises(RLBackendError, match="the sender left"):
        receiver.receive("key", WeightManifest(version=10, tensors=layout))
    assert not receiver.held_push()


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "nccl", "cuda_ipc"])
def test_what_changed_is_sent_over_gloo_alone(transport: Any) -> None:
    rollout: Any = SimpleNamespace(attach_weight_sync=lambda: None)
    ranks: Any = None
    with pytest.raises(ConfigError, match=r"WeightSync.changed_only=True: needs transport='gloo': in shared memory all is"):
        WeightSync(ranks, rollout, transport=transport, changed_only=True)
    tenant = HandleRef("group", 1, "tenant", False, (0,), (0,), lora_id=1)
    with pytest.raises(ConfigError, match="changed_only=True: a tenant's factors are one small message; leave it out"):
        WeightSync(ranks, rollout, tenant, changed_only=True)
