from __future__ import annotations

import itertools
import random

import pytest

from rl_backend.contracts import BatchError
from rl_backend.data import plan_micro_batches
from rl_backend.data.balance import ATTENTION_CROSSOVER_TOKENS


def work(length: int) -> float:
    return length + length * length / ATTENTION_CROSSOVER_TOKENS


def test_any_plan_covers_every_sequence_once_within_the_budget_and_leaves_none_empty() -> None:
    generator = random.Random(0)
    for _ in range(400):
        dp_size = generator.randint(1, 8)
        count = dp_size * generator.randint(1, 12)
        longest = generator.choice([1, 7, 100, 4000])
        seq_lens = [generator.randint(1, longest) for _ in range(count)]
        max_tokens = max(seq_lens) + generator.choice([0, 1, longest, 20 * longest])
        multiple = generator.choice([divisor for divisor in range(1, 13) if count // dp_size % divisor == 0])
        plan = plan_micro_batches(seq_lens, dp_size, max_tokens, multiple_of=multiple)
        assert plan.dp_size == dp_size
        assert plan.num_micro_batches % multiple == 0
        assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_batches}
        members = [indices for rank in plan.micro_batches for indices in rank]
        assert all(members)
        assert sorted(itertools.chain.from_iterable(members)) == list(range(count))
        assert all(sum(seq_lens[i] for i in indices) <= max_tokens for indices in members)
        assert plan_micro_batches(seq_lens, dp_size, max_tokens, multiple_of=multiple) == plan


def test_copies_of_the_shortest_sequences_join_those_that_cannot_give_every_rank_as_much() -> None:
    generator = random.Random(3)
    filled = 0
    for _ in range(400):
        dp_size, multiple = generator.randint(1, 5), generator.randint(1, 4)
        seq_lens = [generator.randint(5, 9) for _ in range(generator.randint(1, 20))]
        plan = plan_micro_batches(seq_lens, dp_size, 12, multiple_of=multiple, fill=True)
        filled += bool(plan.fillers)
        assert plan.num_sequences == len(seq_lens)
        assert plan.num_micro_batches % multiple == 0
        assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_batches}
        lengths = [*seq_lens, *(seq_lens[index] for index in plan.fillers)]
        members = [indices for rank in plan.micro_batches for indices in rank]
        assert sorted(itertools.chain.from_iterable(members)) == list(range(len(lengths)))
        assert all(0 < sum(lengths[i] for i in indices) <= 12 for indices in members)
        assert len(plan.fillers) < dp_size * multiple
        uses = [plan.fillers.count(index) for index in range(len(seq_lens))]
        assert max(uses) - min(uses) <= 1
        assert max((seq_lens[i] for i in plan.fillers), default=0) <= min(
            (length for length, used in zip(seq_lens, uses, strict=True) if used == 0), default=12
        )
        try:
            assert plan == plan_micro_batches(seq_lens, dp_size, 12, multiple_of=multiple)
        except BatchError:
            assert plan.fillers
    assert 100 < filled < 400


def test_ranks_get_similar_work_from_skewed_lengths() -> None:
    generator = random.Random(1)
    for dp_size, count, max_tokens in ((2, 64, 8192), (4, 128, 8192), (8, 512, 16384)):
        seq_lens = [min(8192, int(generator.lognormvariate(6.0, 1.0)) + 1) for _ in range(count)]
        plan = plan_micro_batches(seq_lens, dp_size, max_tokens)
        loads = [sum(work(seq_lens[i]) for i in plan.rank_indices(rank)) for rank in range(dp_size)]
        assert max(loads) / min(loads) < 1.03
        in_order = [sum(work(length) for length in seq_lens[rank::dp_size]) for rank in range(dp_size)]
        assert max(loads) < max(in_order)


def test_micro_batches_that_run_at_the_same_time_have_similar_work() -> None:
    generator = random.Random(2)
    seq_lens = [generator.randint(32, 512) for _ in range(128)]
    plan = plan_micro_batches(seq_lens, 4, 2048)
    for position in range(plan.num_micro_batches):
        loads = [sum(work(seq_lens[i]) for i in rank[position]) for rank in plan.micro_batches]
        assert max(loads) / min(loads) < 1.15


def test_the_number_of_micro_batches_is_the_least_that_the_tokens_allow() -> None:
    assert plan_micro_batches([10] * 12, 2, 60).num_micro_batches == 1
    assert plan_micro_batches([10] * 12, 2, 59).num_micro_batches == 2
    assert plan_micro_batches([10] * 12, 2, 10).num_micro_batches == 6
    assert plan_micro_batches([6, 6, 5, 5, 4, 4], 1, 15).num_micro_batches == 2


def test_a_multiple_of_micro_batches_is_the_least_multiple_or_refused() -> None:
    assert plan_micro_batches([10] * 12, 2, 60, multiple_of=2).num_micro_batches == 2
    assert plan_micro_batches([10] * 12, 2, 20, multiple_of=2).num_micro_batches == 4
    # Two micro-batches would hold this many tokens, and no two of these sequences; three would do.
    assert plan_micro_batches([35, 35, 35, 5], 1, 60, multiple_of=2).num_micro_batches == 4
    with pytest.raises(BatchError, match=r"3 sequences for 1 .* at least 4, one for each of 4 micro-batches"):
        plan_micro_batches([10] * 3, 1, 60, multiple_of=4)
    with pytest.raises(BatchError, match=r"into 4 micro-batches .* the most in multiples of 4"):
        plan_micro_batches([10] * 6, 1, 10, multiple_of=4)


def test_a_full_budget_that_only_best_fit_reaches_is_used() -> None:
    assert plan_micro_batches([5, 5, 4, 4, 3, 3, 3], 1, 14).num_micro_batches == 2


def test_plans_that_exist_are_found_when_sequences_do_not_divide_by_ranks() -> None:
    generator = random.Random(3)
    missed = checked = 0
    for _ in range(300):
        seq_lens = [generator.randint(1, 10) for _ in range(5)]
        feasible = any(
            all(
                0 < sum(n for n, bin_ in zip(seq_lens, assignment, strict=True) if bin_ == wanted) <= 10
                for wanted in range(bins)
            )
            for bins in (2, 4)
            for assignment in itertools.product(range(bins), repeat=5)
        )
        checked += feasible
        try:
            assert plan_micro_batches(seq_lens, 2, 10)
            assert feasible
        except BatchError:
            missed += feasible
    assert checked > 100
    assert missed == 0


def test_a_sequence_longer_than_the_budget_is_named() -> None:
    with pytest.raises(BatchError, match="sequence 2 has 33 tokens, more than the budget of 32") as raised:
        plan_micro_batches([4, 4, 33], 1, 32)
    assert raised.value.details == {"index": 2, "length": 33, "max_tokens": 32}


def test_fewer_sequences_than_ranks_are_refused() -> None:
    with pytest.raises(BatchError, match=r"3 sequences for 4 data-parallel ranks"):
        plan_micro_batches([4, 4, 4], 4, 32)


def test_numbers_that_cannot_give_each_rank_as_many_micro_batches_are_refused() -> None:
    with pytest.raises(BatchError, match="3 sequences of 30 tokens do not fit into 1 micro-batches of at most 10 tokens"):
        plan_micro_batches([10, 10, 10], 2, 10)
