"""Operations as one rank runs them, on a runtime that is a stand-in."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.train.context import BuiltModel, HandleRef, RankContext, RankFunction, lora_factors, weight_version
from actors.train.outcome import Apart, Completed, Failed
from actors.train.passes import forward_backward
from rl_backend.contracts import (
    BatchError,
    ForwardResult,
    HandleError,
    Metric,
    OperationOrderError,
    StepResult,
)
from rl_backend.contracts.atoms import Operation
from tests.support.plain_handle import PlainHandle
from tests.support.told_worker import ToldRank, ref

pytestmark = pytest.mark.usefixtures("exported")


def test_an_operation_is_the_runtimes_call_of_that_name_on_its_handles() -> None:
    rank = ToldRank()
    rank.runtime.answers["lr_scheduler_step"] = [0.1, 0.2]
    assert rank.run("lr_scheduler_step", handle=[ref(2), ref(1)]) == [0.1, 0.2]
    rank.run("to", handle=ref(1), device="cpu", grad=False)
    assert rank.runtime.calls == [
        ("lr_scheduler_step", ([rank.frozen, rank.trained],), {}),
        ("to", (rank.trained,), {"device": "cpu", "grad": False}),
    ]
    assert rank.call(weight_version, ref(2)) == 5
    with pytest.raises(HandleError):
        rank.run("zero_grad", handle=ref(3))


@pytest.mark.parametrize(
    ("key", "forward_only", "mode"), [(1, False, "train"), (1, True, "eval"), (2, False, "eval"), (2, True, "eval")]
)
def test_a_pass_trains_or_evaluates_and_sends_outputs_end_to_end(key: int, forward_only: bool, mode: str) -> None:
    rank = ToldRank()
    handle = rank.context.handle(ref(key))
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    part = ForwardResult((4.0,), {"m": Metric(1.0, 2.0)}, {"values": rows}, error="odd", lora_id=7)
    rank.runtime.answers["forward_backward"] = ForwardResult(
        (1.0, 2.0), {"m": Metric(3.0, 4.0)}, {"log_probs": rows}, {"tenant": part}
    )
    found = rank.call(forward_backward, ref(key), ["a batch"], loss="a loss", forward_only=forward_only)
    assert (found.losses, found.metrics) == ((1.0, 2.0), {"m": Metric(3.0, 4.0)})
    ((name, (joined,)),) = found.outputs.items()
    assert name == "log_probs" and joined.tolist() == [1.0, 2.0, 3.0]
    assert found.tenants == {"tenant": replace(part, outputs={"values": ()})}
    assert rank.runtime.calls == [
        (mode, handle.name),
        ("forward_backward", (handle, ["a batch"], "a loss"), {"forward_only": forward_only}),
        (f"{mode} ends", handle.name),
    ]


def test_a_pass_without_a_loss_has_none() -> None:
    rank = ToldRank()
    rank.runtime.answers["forward_backward"] = ForwardResult()
    rank.call(forward_backward, ref(1), ["a batch"], router_replay="R3")
    assert rank.runtime.calls[1] == ("forward_backward", (rank.trained, ["a batch"], None), {"router_replay": "R3"})


def test_a_built_model_is_kept_under_its_operation() -> None:
    rank = ToldRank()
    made = PlainHandle("critic", True, 0, 2, 4, "values", 3, lora_id=6)
    rank.context.operation = 9
    made_ref = HandleRef(rank.context.group_id, 9, "critic", True, (), (), "values", 3, 6)
    for name, given in (("build_model", {"head": "values"}), ("create_lora_adapter", {"handle": ref(2), "lora": "lora"})):
        for is_source in (True, False):
            rank.runtime.answers |= {name: made, "is_mp_src_rank_with_outputs": is_source}
            assert rank.run(name, **given) == BuiltModel(made_ref, 2, 4, is_source)
    asked = [call for call in rank.runtime.calls if call[0] != "is_mp_src_rank_with_outputs"]
    assert asked[::2] == [("build_model", (), {"head": "values"}), ("create_lora_adapter", (rank.frozen,), {"lora": "lora"})]
    assert rank.context.handle(ref(9)) is made
    rank.run("remove_lora_adapter", handle=ref(9))
    assert rank.runtime.calls[-1] == ("remove_lora_adapter", (made,), {})
    with pytest.raises(HandleError):
        rank.context.handle(ref(9))


@pytest.mark.parametrize("rank", [0, 2])
def test_what_only_the_driver_reads_comes_from_rank_0(rank: int) -> None:
    one = ToldRank(rank)
    one.runtime.answers = {
        "export_lora_adapter": iter([("b", torch.ones(2)), ("a", torch.zeros(1))]),
        "get_optimizer_state": "s",
    }
    factors = one.call(lora_factors, ref(1))
    assert list(factors) == (["b", "a"] if rank == 0 else [])
    assert next(one.runtime.answers["export_lora_adapter"], None) is None, "every rank takes part to the end"
    assert one.run("get_optimizer_state", handle=ref(1)) == ("s" if rank == 0 else None)


def test_a_step_is_answered_with_its_result_or_a_list_of_them() -> None:
    rank = ToldRank()
    known = StepResult(True, 1.0, None)
    rank.runtime.answers["optimizer_step"] = known
    assert rank.run("optimizer_step", handle=ref(1)) is known
    rank.runtime.answers["optimizer_step"] = [known]
    assert rank.run("optimizer_step", handle=[ref(1)]) == [known]


def test_the_end_closes_what_callers_kept_and_then_the_runtime() -> None:
    rank = ToldRank()
    closed: list[str] = []

    def close(name: str, error: Exception | None = None) -> Any:
        def body() -> None:
            closed.append(name)
            if error is not None:
                raise error

        return SimpleNamespace(close=body)

    rank.context.state = {
        "first": close("first"),
        "plain": [1, 2],
        "attribute": SimpleNamespace(close="a word"),
        "second": close("second", BatchError("odd")),
    }
    with pytest.raises(BatchError, match="odd"):
        rank.call(RankContext.close)
    assert closed == ["second", "first"] and rank.runtime.calls == [("close", (), {})]


def double(context: RankContext, number: int, *, plus: int) -> int:
    assert context.world_size == 5
    return 2 * number + plus


def apart(context: RankContext) -> Apart[str]:
    return Apart("small", "large")


def test_a_function_runs_with_the_rank_and_its_arguments() -> None:
    rank = ToldRank()
    call = RankFunction(double, (4,), {"plus": 1})
    outcome, stored = rank.execute(call)
    assert isinstance(outcome, Completed) and outcome.value == 9 and outcome.peak_memory > 1 << 20 and stored is None
    assert rank.context.operation == 1
    outcome, stored = rank.execute(RankFunction(apart))
    assert outcome.value == Apart("small", None) and stored == "large" and outcome.peak_memory > 1 << 20
    assert rank.worker.progress() == (2, 2)


def test_an_operation_that_fails_is_answered_and_stops_the_next_of_its_thread() -> None:
    rank = ToldRank()
    rank.runtime.answers["zero_grad"] = BatchError("odd", index=1)
    outcome, stored = rank.execute(Operation("zero_grad", {"handle": ref(1)}))
    assert isinstance(outcome, Failed) and isinstance(outcome.error, BatchError) and stored is None
    rank.runtime.answers.clear()
    outcome, _ = rank.execute(Operation("zero_grad", {"handle": ref(1)}))
    assert isinstance(outcome, Failed) and isinstance(outcome.error, OperationOrderError)
    assert outcome.error.details == {"number": 2, "failed": 1} and "BatchError('odd')" in str(outcome.error)
    assert rank.worker.progress() == (2, 2)
    outcome, _ = rank.execute(Operation("zero_grad", {"handle": ref(1)}), acknowledged=frozenset({1}))
    assert isinstance(outcome, Completed)
