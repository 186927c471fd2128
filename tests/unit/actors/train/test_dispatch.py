"""Operations divided over ranks and put together again, without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ray import cloudpickle

from actors.train.context import HandleRef
from actors.train.dispatch import Shares, join, split
from actors.train.outcome import BuiltModel, RankForward, TenantForward
from rl_backend.contracts import BatchError, HandleError, Metric, RLBackendError, TokenSequence
from rl_backend.contracts.atoms import Operation
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data import MicroBatchPlan
from tests.support.tensordicts import tensordict_of

# Ranks 0 and 3 see the data of data-parallel rank 1; ranks 1 and 2 are the sources.
TWO_BY_TWO = HandleRef("group", 1, "policy", False, (1, 0, 1, 0), (1, 2))


def sequence(first: int, length: int, *, mask: bool = True, tenant: int | None = None) -> TokenSequence:
    ids = torch.arange(first, first + length)
    fields = {} if tenant is None else {LORA_FIELD: torch.tensor(tenant)}
    return TokenSequence(ids, {"loss_mask": (ids < ids[-1]).float()} if mask else {}, fields)


def operation(handle: HandleRef, sequences: Any, **arguments: Any) -> Operation:
    given = {
        "handle": handle,
        "sequences": sequences,
        "forward_only": False,
        "meta": None,
        "max_tokens_per_micro_batch": None,
        **arguments,
    }
    return Operation("forward_backward", given)


def calls_of(shares: Shares) -> list[Operation]:
    return [cloudpickle.loads(call) for call in shares.calls]


def ids(call: Operation) -> list[list[list[int]]]:
    """[micro-batch][sequence] -> its tokens."""
    return [[row.tolist() for row in batch.input_ids.split(batch.seq_lens.tolist())] for batch in call.arguments["data"]]


def test_an_operation_without_sequences_is_the_same_on_every_rank() -> None:
    whole = Operation("zero_grad", {"handle": TWO_BY_TWO})
    shares = split(whole, 3, 64, has_loss=False)
    assert calls_of(shares) == [whole] * 3
    assert (shares.plan, shares.seq_lens, shares.tenants) == (None, (), ())


@pytest.mark.parametrize("as_dict", [False, True])
def test_each_rank_gets_the_sequences_of_its_data_parallel_rank(as_dict: bool) -> None:
    lengths = (5, 3, 4, 2, 6)
    rows = [sequence(10 * index, length) for index, length in enumerate(lengths)]
    given = tensordict_of(rows) if as_dict else rows
    whole = operation(TWO_BY_TWO, given, router_replay="R3", meta={"temperature": 0.5})
    before = dict(whole.arguments)
    shares = split(whole, 4, 10, has_loss=True)
    assert whole.arguments == before, "a refused operation may be tried again"
    calls = calls_of(shares)
    assert [call.name for call in calls] == ["forward_backward"] * 4
    assert shares.calls[0] == shares.calls[2] != shares.calls[1] == shares.calls[3]
    for call in calls:
        assert call.arguments.keys() == {"handle", "forward_only", "router_replay", "data"}
        assert (call.arguments["router_replay"], call.arguments["handle"]) == ("R3", TWO_BY_TWO)
        for batch in call.arguments["data"]:
            assert batch.input_ids.shape[0] <= 10 and batch.meta["temperature"] == 0.5
    assert shares.plan is not None and list(shares.seq_lens) == list(lengths)
    for rank, dp_rank in enumerate((1, 0, 1, 0)):
        planned = [[rows[index].input_ids.tolist() for index in batch] for batch in shares.plan.micro_batches[dp_rank]]
        assert ids(calls[rank]) == planned
    seen = sorted(row for call in calls[:2] for batch in ids(call) for row in batch)
    assert seen == sorted(row.input_ids.tolist() for row in rows)


def test_the_budget_is_the_configurations_or_a_smaller_one() -> None:
    one = HandleRef("group", 1, "policy", False, (0,), (0,))
    rows = [sequence(10 * index, 4) for index in range(4)]
    for wanted, batches in ((None, 2), (8, 2), (4, 4)):
        shares = split(operation(one, rows, max_tokens_per_micro_batch=wanted), 1, 8, has_loss=True)
        assert [len(call.arguments["data"]) for call in calls_of(shares)] == [batches]
    with pytest.raises(BatchError, match=r"^max_tokens_per_micro_batch=9 is more than the configuration's 8; ask for less"):
        split(operation(one, rows, max_tokens_per_micro_batch=9), 1, 8, has_loss=True)


def test_the_number_of_micro_batches_is_a_multiple_of_the_models() -> None:
    handle = HandleRef("group", 1, "policy", False, (0,), (0,), micro_batch_multiple=3)
    rows = [sequence(10 * index, 4) for index in range(4)]
    (call,) = calls_of(split(operation(handle, rows), 1, 8, has_loss=True))
    assert len(call.arguments["data"]) == 3


def test_fillers_join_where_a_loss_cannot_count_them() -> None:
    masked, bare = [sequence(1, 4)], [sequence(1, 4, mask=False)]
    for rows, has_loss, forward_only in ((masked, True, False), (bare, False, True), (masked, False, True)):
        shares = split(operation(TWO_BY_TWO, rows, forward_only=forward_only), 4, 8, has_loss=has_loss)
        assert shares.plan is not None and shares.plan.fillers == (0,) and list(shares.seq_lens) == [4, 4]
    with pytest.raises(BatchError):
        split(operation(TWO_BY_TWO, bare), 4, 8, has_loss=True)


@pytest.mark.parametrize(
    ("forward_only_model", "tenant", "forward_only", "has_loss", "refusal"),
    [
        (True, None, False, True, (HandleError, "model 'policy' is forward-only; a backward pass needs gradients")),
        (True, None, False, False, (HandleError, "model 'policy' is forward-only; a backward pass needs gradients")),
        (True, None, True, False, None),
        (True, None, True, True, None),
        (True, 0, False, True, None),
        (True, 0, False, False, (BatchError, "loss=None: only a forward_only pass can do without a loss")),
        (False, None, False, False, (BatchError, "loss=None: only a forward_only pass can do without a loss")),
        (False, None, True, False, None),
    ],
)
def test_a_backward_pass_needs_a_loss_and_a_model_or_tenants_that_train(
    forward_only_model: bool,
    tenant: int | None,
    forward_only: bool,
    has_loss: bool,
    refusal: tuple[type[Exception], str] | None,
) -> None:
    handle = HandleRef("group", 1, "policy", forward_only_model, (0,), (0,))
    given = operation(handle, [sequence(1, 4, tenant=tenant)], forward_only=forward_only)
    if refusal is None:
        assert len(split(given, 1, 8, has_loss=has_loss).calls) == 1
        return
    kind, message = refusal
    with pytest.raises(kind) as caught:
        split(given, 1, 8, has_loss=has_loss)
    assert str(caught.value) == message


def test_no_sequences_are_refused() -> None:
    with pytest.raises(BatchError):
        split(operation(TWO_BY_TWO, []), 4, 8, has_loss=True)


def test_sequences_of_tenants_are_planned_apart_unless_all_go_to_one() -> None:
    rows = [sequence(10 * index, 4, tenant=tenant) for index, tenant in enumerate((7, 0, 7, 0))]
    base = HandleRef("group", 1, "base", True, (0,), (0,))
    shares = split(operation(base, rows), 1, 16, has_loss=True)
    assert list(shares.tenants) == [7, 0, 7, 0]
    assert shares.plan is not None
    (in_order,) = [[index for batch in rank for index in batch] for rank in shares.plan.micro_batches]
    assert [(7, 0, 7, 0)[index] for index in in_order] in ([7, 7, 0, 0], [0, 0, 7, 7])
    # The very first tenant too has a number of its own.
    for lora_id in (0, 7):
        tenant = HandleRef("group", 2, "tenant", True, (0,), (0,), lora_id=lora_id)
        assert list(split(operation(tenant, rows), 1, 16, has_loss=True).tenants) == []


def built(rank: int, dp_rank: int, *, source: bool = True, size: int = 2) -> BuiltModel:
    return BuiltModel(5, "policy", dp_rank, size, source, 4, True, "values", 3)


def test_a_model_that_all_ranks_have_built_names_where_its_outputs_are() -> None:
    values = [built(0, 1, source=False), built(1, 0), built(2, 1), built(3, 0, source=False)]
    made = join(Operation("build_model", {}), Shares([]), values, "group")
    assert made == HandleRef("group", 5, "policy", True, (1, 0, 1, 0), (1, 2), "values", 4, 3)
    assert made.data_parallel_size == 2


@pytest.mark.parametrize(
    ("values", "ranks", "dp_ranks"),
    [
        ([built(0, 0), built(1, 1, source=False)], [0], [0]),
        ([built(0, 0), built(1, 0), built(2, 1)], [1, 2], [0, 1]),
        ([built(0, 1), built(1, 2)], [0, 1], [1, 2]),
        ([built(0, 0, source=False)], [], []),
    ],
)
def test_a_runtime_without_one_source_for_each_data_parallel_rank_is_refused(
    values: Sequence[BuiltModel], ranks: list[int], dp_ranks: list[int]
) -> None:
    with pytest.raises(RLBackendError) as caught:
        join(Operation("build_model", {}), Shares([]), values, "group")
    assert str(caught.value) == (
        f"the runtime names ranks {ranks} as sources of the outputs of data-parallel ranks {dp_ranks}; expected one for "
        "each of 2"
    )


def part(lora_id: int, losses: tuple[float, ...], metric: Metric, error: str = "") -> TenantForward:
    return TenantForward(lora_id, losses, {"m": metric}, error, ("log_probs",))


def test_outputs_come_in_the_callers_order_and_losses_are_means_over_data_parallel_ranks() -> None:
    plan = MicroBatchPlan((((1,), (0, 3)), ((2,), (4,))), fillers=(2,))
    lengths = [2, 3, 1, 4, 1]
    rows = [torch.full((length, 2), float(index)) for index, length in enumerate(lengths)]
    first = RankForward(
        (1.0, 5.0),
        {"m": Metric(1.0, 2.0)},
        {"log_probs": torch.cat([rows[1], rows[0], rows[3]])},
        {"a": part(7, (1.0,), Metric(1.0, 1.0)), "b": part(0, (4.0,), Metric(2.0, 1.0))},
    )
    second = RankForward(
        (2.0, 7.0),
        {"m": Metric(3.0, 5.0), "n": Metric(9.0, 1.0)},
        {"log_probs": torch.cat([rows[2], rows[4]])},
        {"a": part(7, (2.0,), Metric(5.0, 3.0), "its loss failed"), "b": part(0, (9.0,), Metric(4.0, 1.0))},
    )
    unread = RankForward((100.0, 100.0), {"m": Metric(100.0, 100.0)}, {})
    whole = Operation("forward_backward", {"handle": TWO_BY_TWO})
    values = [unread, first, second, unread]
    result = join(whole, Shares([], plan, lengths, [7, 0, 0, 7]), values, "group")
    assert result.losses == (1.5, 6.0)
    assert result.metrics == {"m": Metric(4.0, 7.0), "n": Metric(9.0, 1.0)}
    assert [row.tolist() for row in result.outputs["log_probs"]] == [row.tolist() for row in rows[:4]]
    assert result.tenants.keys() == {"a", "b"}
    a, b = result.tenants["a"], result.tenants["b"]
    assert (a.losses, a.metrics, a.error, a.lora_id) == ((1.5,), {"m": Metric(6.0, 4.0)}, "its loss failed", 7)
    assert (b.losses, b.metrics, b.error, b.lora_id) == ((6.5,), {"m": Metric(6.0, 2.0)}, "", 0)
    assert [row.tolist() for row in a.outputs["log_probs"]] == [rows[0].tolist(), rows[3].tolist()]
    assert [row.tolist() for row in b.outputs["log_probs"]] == [rows[1].tolist(), rows[2].tolist()]


def joined(name: str, values: Sequence[Any]) -> Any:
    return join(Operation(name, {"handle": TWO_BY_TWO}), Shares([]), values, "group")


def test_other_results_are_joined_as_their_atom_says() -> None:
    assert joined("zero_grad", ["a", "b"]) == "a"
    assert joined("checkpoint_is_pending", [False, False, True]) is True
    assert joined("checkpoint_is_pending", [False, False]) is False
    assert joined("run_on_ranks", ("a", "b")) == ["a", "b"]
    assert joined("weight_version", [3, 3, 3]) == 3
    assert joined("optimizer_step", [4, 0, 5]) == 4
    with pytest.raises(RLBackendError, match=r"^ranks disagree on the weight version of 'policy': \[3, 3, 4\]$"):
        joined("weight_version", [3, 3, 4])
