"""Sequences of several tenants share micro-batches, and each tenant's are cut and ordered as without the others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from rl_backend.contracts import BatchError, TokenSequence
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data.balance import MicroBatchPlan, plan_micro_batches, plan_tenants
from rl_backend.data.micro_batches import pack_plan

BUDGET = 40


def own_parts(plan: MicroBatchPlan, own: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """What each rank has of one tenant, micro-batch by micro-batch, without those that have nothing of it."""
    chosen = set(own)
    return [
        [part for batch in rank if (part := tuple(index for index in batch if index in chosen))]
        for rank in plan.micro_batches
    ]


def sequences_of(seq_lens: Sequence[int], tenants: Sequence[int]) -> list[TokenSequence]:
    return [
        TokenSequence(
            torch.zeros(length, dtype=torch.int64),
            {"loss_mask": torch.arange(length) < length - 1},
            {LORA_FIELD: torch.tensor(tenant)},
        )
        for length, tenant in zip(seq_lens, tenants, strict=True)
    ]


@pytest.mark.parametrize("multiple_of", [1, 2, 3])
@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_each_tenant_is_cut_as_it_would_be_alone_and_in_that_order(dp_size: int, multiple_of: int, seed: int) -> None:
    choose = random.Random(seed)
    # As many as always fit: one to a micro-batch.
    counts = [dp_size * multiple_of * choose.randint(1, 4) for _ in range(3)]
    tenants = [tenant for tenant, count in enumerate(counts) for _ in range(count)]
    choose.shuffle(tenants)
    seq_lens = [choose.randint(1, BUDGET // 2) for _ in tenants]
    plan = plan_tenants(seq_lens, tenants, dp_size, BUDGET, multiple_of=multiple_of)
    assert plan.num_micro_batches % multiple_of == 0
    assert sorted(index for rank in plan.micro_batches for batch in rank for index in batch) == list(range(len(tenants)))
    for rank in plan.micro_batches:
        assert all(0 < sum(seq_lens[index] for index in batch) <= BUDGET for batch in rank)
    for tenant in range(3):
        own = [index for index, each in enumerate(tenants) if each == tenant]
        alone = plan_micro_batches([seq_lens[index] for index in own], dp_size, BUDGET, multiple_of=multiple_of)
        expected = [[tuple(own[place] for place in batch) for batch in rank] for rank in alone.micro_batches]
        assert own_parts(plan, own) == expected


def test_a_column_that_moves_to_make_a_multiple_keeps_its_tenants_order() -> None:
    # The first column of the second tenant fits beside one of the first tenant; its other column makes a third micro-batch.
    plan = plan_tenants([40, 20, 20, 20], [0, 0, 1, 1], 1, BUDGET, multiple_of=2)
    assert len(plan.micro_batches[0]) == 4
    assert own_parts(plan, (0, 1)) == [[(0,), (1,)]]
    first_of_other = plan_micro_batches([20, 20], 1, BUDGET, multiple_of=2).micro_batches[0]
    assert own_parts(plan, (2, 3)) == [[tuple(2 + place for place in batch) for batch in first_of_other]]


def test_sequences_are_refused_by_the_callers_index_and_the_tenants_number() -> None:
    with pytest.raises(BatchError, match="sequence 3 has 41 tokens"):
        plan_tenants([5, 5, 5, 41], [0, 0, 7, 7], 2, BUDGET)
    with pytest.raises(BatchError, match="LoRA tenant 7: 1 sequences for 2 data-parallel ranks") as refused:
        plan_tenants([5, 5, 5], [0, 0, 7], 2, BUDGET)
    assert refused.value.details["tenant"] == 7


def test_copies_join_each_tenants_sequences_by_themselves() -> None:
    tenants, seq_lens = [7, 0, 0, 0], [30, 25, 22, 21]
    plan = plan_tenants(seq_lens, tenants, 2, BUDGET, fill=True)
    assert plan.fillers == (0, 3)
    assert plan.num_sequences == 4
    for tenant, own in ((7, [0, 4]), (0, [1, 2, 3, 5])):
        lengths = [seq_lens[index] for index, each in enumerate(tenants) if each == tenant]
        alone = plan_micro_batches(lengths, 2, BUDGET, fill=True)
        expected = [[tuple(own[place] for place in batch) for batch in rank] for rank in alone.micro_batches]
        assert own_parts(plan, own) == expected
    sequences = sequences_of(seq_lens, tenants)
    ((first, *_), _) = pack_plan(sequences, plan)
    assert first.meta["tenants"] == {
        7: {"global_batch_size": 1, "num_micro_batches": 1, "batch_num_tokens": 29.0},
        0: {"global_batch_size": 3, "num_micro_batches": 2, "batch_num_tokens": 24.0 + 21.0 + 20.0},
    }


def test_each_tenant_has_facts_of_its_own_and_the_callers_come_first() -> None:
    tenants, seq_lens = [3, -1, 3, 3], [30, 20, 30, 10]
    sequences = sequences_of(seq_lens, tenants)
    plan = plan_tenants(seq_lens, tenants, 1, BUDGET)
    ((first, *_),) = pack_plan(sequences, plan, {"tenants": {3: {"batch_num_tokens": 500.0}}})
    assert first.meta["tenants"] == {
        3: {"global_batch_size": 3, "num_micro_batches": 2, "batch_num_tokens": 500.0},
        -1: {"global_batch_size": 1, "num_micro_batches": 1, "batch_num_tokens": 19.0},
    }
    assert first.meta["batch_num_tokens"] == 29.0 + 19.0 + 29.0 + 9.0
    with pytest.raises(BatchError, match=r"meta\['global_batch_size'\]=8: sequences of several LoRA tenants"):
        pack_plan(sequences, plan, {"global_batch_size": 8})
    alone = [sequence for sequence, tenant in zip(sequences, tenants, strict=True) if tenant == 3]
    ((first, *_),) = pack_plan(alone, plan_tenants([30, 30, 10], [3] * 3, 1, BUDGET), {"batch_num_tokens": 7.0})
    assert first.meta["tenants"][3]["batch_num_tokens"] == first.meta["batch_num_tokens"] == 7.0
