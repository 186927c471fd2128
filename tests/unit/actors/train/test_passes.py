"""Passes divided over ranks and put together again, without ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.train.context import HandleRef
from actors.train.passes import Pass, PassOptions, Shares, merged, spread, token_budget
from rl_backend.contracts import BatchError, ForwardResult, Metric, PackedBatch, TokenSequence
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data import MicroBatchPlan

# Ranks 0 and 3 see the data of data-parallel rank 1; ranks 1 and 2 are the sources.
TWO_BY_TWO = HandleRef("group", 1, "policy", False, (1, 0, 1, 0), (1, 2))


def sequence(first: int, length: int, *, mask: bool = True, tenant: int | None = None) -> TokenSequence:
    ids = torch.arange(first, first + length)
    fields = {} if tenant is None else {LORA_FIELD: torch.tensor(tenant)}
    return TokenSequence(ids, {"loss_mask": (ids < ids[-1]).float()} if mask else {}, fields)


def shares_of(handle: HandleRef, rows: Sequence[TokenSequence], max_tokens: int = 8, **given: Any) -> Shares:
    return spread(handle, rows, PassOptions(max_tokens, True, False, "off", {})._replace(**given))


def ids(batches: Sequence[PackedBatch]) -> list[list[list[int]]]:
    """[micro-batch][sequence] -> its tokens."""
    return [[row.tolist() for row in batch.input_ids.split(batch.seq_lens.tolist())] for batch in batches]


def test_each_data_parallel_rank_gets_its_sequences() -> None:
    lengths = (5, 3, 4, 2, 6)
    rows = [sequence(10 * index, length) for index, length in enumerate(lengths)]
    shares = shares_of(TWO_BY_TWO, rows, 10, meta={"temperature": 0.5})
    assert list(shares.seq_lens) == list(lengths) and len(shares.batches) == 2
    for dp_rank, batches in enumerate(shares.batches):
        for batch in batches:
            assert batch.input_ids.shape[0] <= 10 and batch.meta["temperature"] == 0.5
        planned = [[rows[index].input_ids.tolist() for index in batch] for batch in shares.plan.micro_batches[dp_rank]]
        assert ids(batches) == planned
    seen = sorted(row for batches in shares.batches for batch in ids(batches) for row in batch)
    assert seen == sorted(row.input_ids.tolist() for row in rows)


def test_the_budget_is_the_configurations_or_a_smaller_one() -> None:
    one = HandleRef("group", 1, "policy", False, (0,), (0,))
    rows = [sequence(10 * index, 4) for index in range(4)]
    for wanted, batches in ((None, 2), (8, 2), (4, 4)):
        assert [len(share) for share in shares_of(one, rows, token_budget(wanted, 8)).batches] == [batches]
    with pytest.raises(BatchError, match=r"^max_tokens_per_micro_batch=9 is more than the configuration's 8; ask for less"):
        token_budget(9, 8)


def test_the_number_of_micro_batches_is_a_multiple_of_the_models() -> None:
    handle = HandleRef("group", 1, "policy", False, (0,), (0,), micro_batch_multiple=3)
    rows = [sequence(10 * index, 4) for index in range(4)]
    (batches,) = shares_of(handle, rows).batches
    assert len(batches) == 3


def test_sequences_that_begin_alike_stay_together_where_the_model_shares_their_tokens() -> None:
    prompts = [torch.arange(40), torch.arange(40, 80)]
    rows = [
        TokenSequence(torch.cat((prompt, torch.tensor([100 + index]))), {"loss_mask": torch.zeros(41)})
        for index in range(4)
        for prompt in prompts
    ]
    shares = shares_of(replace(TWO_BY_TWO, shares_prefixes=True), rows, 44)
    assert shares.plan.micro_batches == (((0, 2, 4, 6),), ((1, 3, 5, 7),))
    assert shares.batches[1][0].meta["num_micro_batches"] == 1
    assert shares_of(TWO_BY_TWO, rows, 44).plan.num_micro_batches == 4
    # A token with another route is another token.
    routed = [row.with_fields({"routed_experts": torch.full((41, 1, 1), index)}) for index, row in enumerate(rows)]
    for replay, micro_batches in (("record", 1), ("replay", 4)):
        found = shares_of(replace(TWO_BY_TWO, shares_prefixes=True), routed, 44, router_replay=replay)
        assert found.plan.num_micro_batches == micro_batches


def test_fillers_join_where_a_loss_cannot_count_them() -> None:
    masked, bare = [sequence(1, 4)], [sequence(1, 4, mask=False)]
    for rows, has_loss in ((masked, True), (bare, False), (masked, False)):
        shares = shares_of(TWO_BY_TWO, rows, forward_only=not has_loss, has_loss=has_loss)
        assert shares.plan.fillers == (0,) and list(shares.seq_lens) == [4, 4]
    with pytest.raises(BatchError):
        shares_of(TWO_BY_TWO, bare)


@pytest.mark.parametrize(
    ("forward_only_model", "tenant", "forward_only", "has_loss", "refusal"),
    [
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
    rows = [sequence(1, 4, tenant=tenant)]
    if refusal is None:
        assert len(shares_of(handle, rows, forward_only=forward_only, has_loss=has_loss).batches) == 1
        return
    kind, message = refusal
    with pytest.raises(kind) as caught:
        shares_of(handle, rows, forward_only=forward_only, has_loss=has_loss)
    assert str(caught.value) == message


def test_no_sequences_are_refused() -> None:
    with pytest.raises(BatchError):
        shares_of(TWO_BY_TWO, [])


def test_sequences_of_tenants_are_planned_apart_unless_all_go_to_one() -> None:
    rows = [sequence(10 * index, 4, tenant=tenant) for index, tenant in enumerate((7, 0, 7, 0))]
    base = HandleRef("group", 1, "base", True, (0,), (0,))
    shares = shares_of(base, rows, 16)
    assert list(shares.tenants) == [7, 0, 7, 0]
    (in_order,) = [[index for batch in rank for index in batch] for rank in shares.plan.micro_batches]
    assert [(7, 0, 7, 0)[index] for index in in_order] in ([7, 7, 0, 0], [0, 0, 7, 7])
    # The very first tenant too has a number of its own.
    for lora_id in (0, 7):
        tenant = HandleRef("group", 2, "tenant", True, (0,), (0,), lora_id=lora_id)
        assert list(shares_of(tenant, rows, 16).tenants) == []


def part(lora_id: int, losses: tuple[float, ...], metric: Metric, error: str = "") -> ForwardResult:
    return ForwardResult(losses, {"m": metric}, {"log_probs": ()}, error=error, lora_id=lora_id)


def test_outputs_come_in_the_callers_order_and_losses_are_means_over_data_parallel_ranks() -> None:
    plan = MicroBatchPlan((((1,), (0, 3)), ((2,), (4,))), fillers=(2,))
    lengths = [2, 3, 1, 4, 1]
    rows = [torch.full((length, 2), float(index)) for index, length in enumerate(lengths)]
    first = ForwardResult(
        (1.0, 5.0),
        {"m": Metric(1.0, 2.0)},
        {"log_probs": [torch.cat([rows[1], rows[0], rows[3]])]},
        {"a": part(7, (1.0,), Metric(1.0, 1.0)), "b": part(0, (4.0,), Metric(2.0, 1.0))},
    )
    second = ForwardResult(
        (2.0, 7.0),
        {"m": Metric(3.0, 5.0), "n": Metric(9.0, 1.0)},
        {"log_probs": [torch.cat([rows[2], rows[4]])]},
        {"a": part(7, (2.0,), Metric(5.0, 3.0), "its loss failed"), "b": part(0, (9.0,), Metric(4.0, 1.0))},
    )
    unread = ForwardResult((100.0, 100.0), {"m": Metric(100.0, 100.0)}, {})
    values = [unread, first, second, unread]
    result = merged(TWO_BY_TWO, Shares([], plan, lengths, [7, 0, 0, 7]), values)
    assert result.losses == (1.5, 6.0)
    assert result.metrics == {"m": Metric(4.0, 7.0), "n": Metric(9.0, 1.0)}
    assert [row.tolist() for row in result.outputs["log_probs"]] == [row.tolist() for row in rows[:4]]
    assert result.tenants.keys() == {"a", "b"}
    a, b = result.tenants["a"], result.tenants["b"]
    assert (a.losses, a.metrics, a.error, a.lora_id) == ((1.5,), {"m": Metric(6.0, 4.0)}, "its loss failed", 7)
    assert (b.losses, b.metrics, b.error, b.lora_id) == ((6.5,), {"m": Metric(6.0, 2.0)}, "", 0)
    assert [row.tolist() for row in a.outputs["log_probs"]] == [rows[0].tolist(), rows[3].tolist()]
    assert [row.tolist() for row in b.outputs["log_probs"]] == [rows[1].tolist(), rows[2].tolist()]


@pytest.mark.parametrize("tenants", [(0, 0, 0), (0, 1, 1)])
def test_a_pass_is_spread_again_over_another_layout(tenants: tuple[int, ...]) -> None:
    """Also where fillers had joined it, and of several tenants."""
    rows = [sequence(10 * index, 3 + index, tenant=tenant) for index, tenant in enumerate(tenants)]
    one = replace(TWO_BY_TWO, data_parallel_ranks=(0,), source_ranks=(0,))
    for handle in (TWO_BY_TWO, replace(TWO_BY_TWO, micro_batch_multiple=2)):
        options = PassOptions(8, True, False, "off", {"temperature": 0.5})
        before = Pass.over(handle, rows, options)
        assert [before.shares.index(call) for call in before.calls] == [1, 0, 1, 0]
        after, expected = before.on(one), Pass.over(one, rows, options)
        (found,), (wanted,) = ([pickle.loads(share).args for share in each.shares] for each in (after, expected))
        assert found[0] == one and ids(found[1]) == ids(wanted[1])
        for batch, other in zip(found[1], wanted[1], strict=True):
            assert batch.meta == other.meta and batch.meta["dp_size"] == 1
            assert batch.token_fields["loss_mask"].equal(other.token_fields["loss_mask"])
            assert batch.sequence_fields[LORA_FIELD].equal(other.sequence_fields[LORA_FIELD])
        assert after.divided == expected.divided
