"""Plans against the documented rule in its plainest form, and what packed micro-batches know of their batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rl_backend.contracts import EPISODE_SHARE, TARGET_IDS, BatchError, TokenSequence
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data.balance import ATTENTION_CROSSOVER_TOKENS, MicroBatchPlan, plan_micro_batches, plan_tenants
from rl_backend.data.micro_batches import check_same_fields, pack, pack_plan, restore_order


def work(lengths: Sequence[int], members: Sequence[int]) -> float:
    return sum(lengths[each] + lengths[each] ** 2 / ATTENTION_CROSSOVER_TOKENS for each in members)


def placed(lengths: Sequence[int], bins: int, most: int, *, by_work: bool) -> list[list[int]] | None:
    """Longest first, each to the bin with the least work that has room, or else to the fullest that has room."""
    found: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        fits = [own for own in found if sum(lengths[each] for each in own) + lengths[index] <= most]
        if not fits:
            return None
        if by_work:
            best = min(fits, key=lambda own: work(lengths, own))
        else:
            best = max(fits, key=lambda own: sum(lengths[each] for each in own))
        best.append(index)
    return found


def ruled(lengths: Sequence[int], ranks: int, most: int, multiple: int) -> Any:
    """The plan without copies; None where there is none."""
    per_rank = multiple
    while per_rank * ranks <= len(lengths):
        found = None
        if sum(lengths) <= per_rank * ranks * most:
            found = placed(lengths, per_rank * ranks, most, by_work=True)
            if found is None and (found := placed(lengths, per_rank * ranks, most, by_work=False)) is not None:
                several = [own for own in found if len(own) > 1]
                for own in found:
                    if not own:
                        while len(several[-1]) == 1:
                            several.pop()
                        own.append(several[-1].pop())
        if found is not None:
            columns = sorted((tuple(sorted(own)) for own in found), key=lambda own: (-work(lengths, own), own))
            plan: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
            totals = [0.0] * ranks
            for start in range(0, len(columns), ranks):
                order = sorted(range(ranks), key=lambda rank: totals[rank])
                for rank, column in zip(order, columns[start : start + ranks], strict=True):
                    plan[rank].append(column)
                    totals[rank] += work(lengths, column)
            return tuple(map(tuple, plan))
        per_rank += multiple
    return None


def test_plans_are_those_of_the_rule() -> None:
    draw = random.Random(5)
    planned = best_fit = 0
    for _ in range(300):
        ranks, multiple = draw.randint(1, 3), draw.choice([1, 1, 2, 3])
        most = draw.choice([12, 40, 60_000])
        lengths = [draw.randint(1, most if draw.random() < 0.5 else most // 2) for _ in range(draw.randint(1, 14))]
        expected = ruled(lengths, ranks, most, multiple)
        if expected is None:
            with pytest.raises(BatchError):
                plan_micro_batches(lengths, ranks, most, multiple_of=multiple)
            continue
        planned += 1
        best_fit += placed(lengths, len(expected[0]) * ranks, most, by_work=True) is None
        assert plan_micro_batches(lengths, ranks, most, multiple_of=multiple).micro_batches == expected
    assert planned > 100 and best_fit > 3


def test_copies_are_of_the_shortest_each_as_often_as_any() -> None:
    plan = plan_micro_batches([9, 7, 8, 7, 9], 4, 9, fill=True)
    assert plan.fillers == (1, 3, 2) and (plan.num_sequences, plan.dp_size, plan.num_micro_batches) == (5, 4, 2)
    assert plan.with_fillers("abcde") == ["a", "b", "c", "d", "e", "b", "d", "c"]
    assert plan_micro_batches([9, 7], 3, 9, multiple_of=2, fill=True).fillers == (1, 0, 1, 0)
    assert plan_micro_batches([4, 4, 4], 1, 12, fill=True).fillers == ()
    two = MicroBatchPlan((((0, 2), (1,)), ((3,), (4, 5))), (2,))
    assert [two.rank_indices(rank) for rank in range(2)] == [(0, 2, 1), (3, 4, 5)] and two.num_sequences == 5
    assert restore_order(two, [["a", "c", "b"], ["d", "e", "f"]]) == ["a", "b", "c", "d", "e"]
    for values in ([["a", "c"], ["d", "e", "f"]], [["a", "c", "b"]], [["a", "c", "b"], ["d", "e", "f"], []]):
        with pytest.raises(ValueError, match="zip"):
            restore_order(two, values)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([4, 5], 1, 4), {"fill": True}, "sequence 1 has 5 tokens, more than the budget of 4 for one micro-batch"),
        (
            ([4, 4, 4], 2, 4),
            {"multiple_of": 2},
            "3 sequences for 2 data-parallel ranks; each rank needs at least 2, one for",
        ),
        (([], 1, 4), {"fill": True}, "0 sequences for 1 data-parallel ranks; each rank needs at least one"),
        (([], 1, 4), {}, "0 sequences for 1 data-parallel ranks; each rank needs at least one"),
        (
            ([4] * 7, 2, 4),
            {"multiple_of": 3},
            "7 sequences of 28 tokens do not fit into 3 micro-batches of at most 4 tokens",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=f"^{message}"):
        plan_micro_batches(*arguments, **options)
    plan_micro_batches([4, 4], 1, 4, multiple_of=2)


def test_columns_of_tenants_share_the_first_micro_batches_that_have_room() -> None:
    plan = plan_tenants([30, 30, 9, 25, 8], [0, 0, 1, 2, 1], 1, 40)
    # Tenant 1's two fit into one column of 17, which has no room beside 30; tenant 2's 25 has none anywhere.
    assert plan.micro_batches == (((0,), (1,), (2, 4), (3,)),)
    assert plan_tenants([30, 30, 9, 8, 9], [0, 0, 1, 1, 2], 1, 40).micro_batches == (((0, 4), (1,), (2, 3)),)
    ranks = plan_tenants([30, 20, 9, 10], [0, 0, 5, 5], 2, 40)
    assert ranks.micro_batches == (((0, 3),), ((1, 2),))
    over = plan_tenants([30, 20, 9, 11], [0, 0, 5, 5], 2, 40)
    assert [len(rank) for rank in over.micro_batches] == [2, 2], "a column needs room on the fullest of its ranks"


def sequence(length: int, **fields: Any) -> TokenSequence:
    mask = torch.ones(length)
    mask[-1] = 0
    return TokenSequence(torch.arange(length), {"loss_mask": mask}, {name: torch.tensor(v) for name, v in fields.items()})


def test_each_micro_batch_knows_the_batch_and_no_argument_is_changed() -> None:
    sequences = [
        sequence(4, **{EPISODE_SHARE: 0.5}),
        sequence(3, **{EPISODE_SHARE: 0.5}),
        sequence(2, **{EPISODE_SHARE: 1.0}),
    ]
    meta = {"temperature": 2.0}
    ranks = pack_plan(sequences, MicroBatchPlan((((2,), (0,)), ((1,), (3,))), (2,)), meta)
    assert meta == {"temperature": 2.0}
    batches = [batch for rank in ranks for batch in rank]
    for batch in batches:
        assert batch.meta == {
            "temperature": 2.0, "global_batch_size": 2.0, "batch_num_tokens": 6.0, "dp_size": 2, "num_micro_batches": 2,
        }  # fmt: skip
    assert [batch.num_tokens for batch in batches] == [2, 4, 3, 2]
    copy = ranks[1][1]
    assert not copy.token_fields["loss_mask"].any() and copy.sequence_fields[EPISODE_SHARE].tolist() == [0.0]
    assert torch.equal(copy.input_ids, sequences[2].input_ids) and sequences[2].token_fields["loss_mask"].any()
    plain = pack_plan([sequence(3), sequence(2)], MicroBatchPlan((((0,),), ((1, 2),)), (1,)))
    assert plain[0][0].sequence_fields[EPISODE_SHARE].tolist() == [1.0]
    assert plain[1][0].sequence_fields[EPISODE_SHARE].tolist() == [1.0, 0.0]
    assert plain[0][0].sequence_fields[EPISODE_SHARE].dtype == torch.float64
    assert EPISODE_SHARE not in pack_plan([sequence(3)], MicroBatchPlan((((0,),),)))[0][0].sequence_fields


def test_facts_of_tenants_are_of_their_own_sequences() -> None:
    sequences = [
        sequence(n, **{LORA_FIELD: tenant, EPISODE_SHARE: s}) for n, tenant, s in ((4, 7, 0.5), (3, 2, 1.0), (6, 7, 0.5))
    ]
    plan = MicroBatchPlan((((0,), (1, 2)),))
    facts = pack_plan(sequences, plan, {"tenants": {2: {"global_batch_size": 9}}})[0][0].meta
    assert facts["tenants"] == {
        7: {"global_batch_size": 1.0, "num_micro_batches": 2, "batch_num_tokens": 8.0},
        2: {"global_batch_size": 9, "num_micro_batches": 1, "batch_num_tokens": 2.0},
    }
    assert facts["global_batch_size"] == 2.0 and facts["batch_num_tokens"] == 10.0
    bare = [TokenSequence(torch.arange(2), {}, {LORA_FIELD: torch.tensor(each)}) for each in (1, 1)]
    alone = pack_plan(bare, MicroBatchPlan((((0, 1),),)), {"global_batch_size": 5})[0][0].meta
    assert alone["tenants"] == {1: {"global_batch_size": 5, "num_micro_batches": 1}} and alone["global_batch_size"] == 5
    for name in ("batch_num_tokens", "global_batch_size"):
        with pytest.raises(
            BatchError, match=rf"meta\['{name}'\]=3: sequences of several LoRA tenants .*{{lora_id: {{'{name}'"
        ):
            pack_plan(sequences, plan, {name: 3})


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_odd_one_is_named_wherever_it_stands(place: int) -> None:
    usual, fields = TokenSequence(torch.arange(2), {"a": torch.ones(2), "b": torch.ones(2, 3)}), {"a": torch.ones(2)}
    for odd, message in (
        (TokenSequence(torch.arange(2), fields), rf"sequence {place} lacks \['b'\] \(token fields\)"),
        (
            TokenSequence(torch.arange(2), {**fields, "c": torch.ones(2)}),
            rf"sequence {place} lacks \['b'\] and has \['c'\] which the others lack \(token fields\)",
        ),
        (
            TokenSequence(torch.arange(2), {**usual.token_fields, "b": torch.ones(2, 4)}),
            rf"token field 'b' of sequence {place} has shape \(L, 4\), dtype torch.float32, device cpu; the other sequences "
            r"have shape \(L, 3\)",
        ),
    ):
        sequences = [usual, usual]
        sequences.insert(place, odd)
        with pytest.raises(BatchError, match=message):
            check_same_fields(sequences)


def test_packing_copies_meta_and_takes_one_sequence_too() -> None:
    meta = {"temperature": 0.5}
    batch = pack([sequence(3, score=2.0)], meta)
    meta["temperature"] = 9.0
    assert batch.meta == {"temperature": 0.5} and batch.sequence_fields["score"].tolist() == [2.0]
    assert pack([sequence(3)]).meta == {}
    wide = TokenSequence(torch.arange(2), {"loss_mask": torch.tensor([[1.0, 0.0], [0.0, 2.0]])})
    with pytest.raises(BatchError, match=r"loss_mask of sequence 1 is \[0\.0, 2\.0\] at its last position") as refused:
        pack_plan([TokenSequence(torch.arange(2), {"loss_mask": torch.zeros(2, 2)}), wide], MicroBatchPlan((((0, 1),),)))
    assert refused.value.details == {"index": 1, "name": "loss_mask"}


def test_copies_have_no_targets_and_a_mask_may_end_with_a_target() -> None:
    targets, mask = torch.tensor([5, -100, 7]), torch.tensor([1.0, 0.0, 1.0])
    given = TokenSequence(torch.arange(3), {"loss_mask": mask, TARGET_IDS: targets, "advantages": torch.tensor([1.0, 2, 3])})
    ((own,), (copy,)) = pack_plan([given], MicroBatchPlan((((0,),), ((1,),)), (0,)))
    assert own.token_fields[TARGET_IDS].tolist() == [5, -100, 7] and own.token_fields["loss_mask"].tolist() == [1, 0, 1]
    assert copy.token_fields[TARGET_IDS].tolist() == [-100] * 3 and copy.token_fields["loss_mask"].tolist() == [0, 0, 0]
    assert copy.token_fields["advantages"].tolist() == [1, 2, 3] and copy.input_ids.tolist() == [0, 1, 2]
    assert own.meta["batch_num_tokens"] == copy.meta["batch_num_tokens"] == 2.0
    assert targets.tolist() == [5, -100, 7] and mask.tolist() == [1, 0, 1]
