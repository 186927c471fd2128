"""What a rank reports of its operations, and what it answers beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.train import worker
from actors.train.context import RankContext, RankFunction
from actors.train.order import Driver
from actors.train.outcome import Completed, Failed
from actors.train.passes import forward_backward
from rl_backend.contracts import (
    ForwardResult,
    PackedBatch,
)
from rl_backend.contracts.atoms import Operation
from rl_backend.trace.recorder import TraceRecorder
from tests.support.told_worker import ToldRank, ref

pytestmark = pytest.mark.usefixtures("exported")


def packed(*lengths: int) -> PackedBatch:
    return PackedBatch(torch.ones(sum(lengths), dtype=torch.int64), torch.tensor(lengths))


def test_an_operation_reports_its_work_and_the_versions_of_its_models(
    exported: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = TraceRecorder()
    recorder.start()
    monkeypatch.setattr(worker, "span", recorder.span)
    rank = ToldRank(2)
    rank.runtime.answers["forward_backward"] = ForwardResult()
    outcome, _ = rank.execute(RankFunction(forward_backward, (ref(1), [packed(2, 3), packed(4)])))
    assert isinstance(outcome, Completed)
    (event,) = recorder.take()
    assert (event.name, event.category) == ("forward_backward", "operation")
    work = {"micro_batches": 2, "tokens": 9, "sequences": 3}
    assert event.arguments == {"operation": 1, **work, "model": "policy", "weight_version": 3}
    tags = {"group": "group-of", "rank": "2"}
    seconds = [value for name, value, _ in exported if name == "rl_backend_operation_seconds_total"]
    assert len(seconds) == 1 and 0 < seconds[0] < 5
    assert [entry for entry in exported if entry[0] != "rl_backend_operation_seconds_total"] == [
        ("rl_backend_rank_weight_version", 3, {"model": "policy", **tags}),
        ("rl_backend_operations_total", 1, {"operation": "forward_backward", **tags}),
        ("rl_backend_trained_tokens_total", 9.0, tags),
    ]


def nothing(context: RankContext, *given: Any) -> None:
    pass


def test_versions_are_of_every_model_that_an_operation_was_given(exported: list[tuple[Any, ...]]) -> None:
    rank = ToldRank()

    def versions(call: Operation | RankFunction) -> dict[str, int]:
        exported.clear()
        rank.execute(call)
        return {tags["model"]: value for name, value, tags in exported if name == "rl_backend_rank_weight_version"}

    both = {"policy": 3, "reference": 5}
    assert versions(Operation("zero_grad", {"handle": [ref(1), ref(2, "reference")]})) == both
    given = (ref(4, "another group's"), 7, ref(1), ref(2, "reference"))
    assert versions(RankFunction(nothing, given)) == both
    assert versions(Operation("build_model", {})) == {}


def test_calls_beside_operations_are_the_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    made, other = worker.TrainWorker("group", 0, 1, 1, Driver("1", "a driver")), Driver("2", "another")
    first, second = Operation("build_model", {}, 1), Operation("build_model", {}, 2)
    assert (made.begin(Driver("1", ""), "a"), made.begin(other, "b")) == (1, Driver("1", "a driver"))
    made.keep(first)
    made.keep(second)
    made.forget(1)
    assert made.transfer(other) == (1, "a", Driver("1", "a driver"), [second])
    assert made.progress() == (0, 0)
    recorder = TraceRecorder()
    monkeypatch.setattr(worker, "recorder", recorder)
    made.take_trace()
    assert recorder.recording
    made.take_trace(stop=True)
    assert not recorder.recording


def test_rank_0_opens_the_meeting_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker.TrainWorker("group", 0, 1, 1, Driver("1", "a driver"))
    monkeypatch.setattr(
        worker, "RendezvousPoint", lambda address, timeout: SimpleNamespace(rendezvous=f"at {address}", to=timeout)
    )
    assert made.open_rendezvous("10.0.0.1") == Completed("at 10.0.0.1")
    assert made._rendezvous_point is not None, "it lives as long as its rank"

    def refuse(address: str, timeout: Any) -> None:
        raise OSError("address in use")

    monkeypatch.setattr(worker, "RendezvousPoint", refuse)
    outcome = made.open_rendezvous("10.0.0.1")
    assert isinstance(outcome, Failed) and isinstance(outcome.error, OSError)
