from __future__ import annotations

import random

import pytest
import torch

from rl_backend.algorithm.loss_aggregation import aggregate_loss, aggregation_terms
from rl_backend.contracts import EPISODE_SHARE, BatchError, TokenSequence
from rl_backend.data import pack_plan, plan_micro_batches, prepare_micro_batches, restore_order


def random_sequences(generator: random.Random, count: int) -> list[TokenSequence]:
    return [
        TokenSequence.from_prompt_and_response(
            [generator.randrange(100) for _ in range(generator.randint(1, 9))],
            [generator.randrange(100) for _ in range(generator.randint(1, 20))],
        )
        for _ in range(count)
    ]


def test_splitting_a_batch_and_restoring_the_order_gives_back_every_sequence() -> None:
    generator = random.Random(0)
    for _ in range(50):
        dp_size = generator.randint(1, 4)
        sequences = random_sequences(generator, dp_size * generator.randint(1, 9))
        max_tokens = generator.randint(32, 120)
        plan = plan_micro_batches([len(s) for s in sequences], dp_size, max_tokens)
        per_rank = prepare_micro_batches(sequences, dp_size, max_tokens)
        outputs = [[row for batch in batches for row in batch.split(batch.input_ids)] for batches in per_rank]
        for restored, sequence in zip(restore_order(plan, outputs), sequences, strict=True):
            assert torch.equal(restored, sequence.input_ids)


def test_every_micro_batch_knows_the_whole_batch() -> None:
    sequences = random_sequences(random.Random(1), 8)
    per_rank = prepare_micro_batches(sequences, 2, 64, {"temperature": 0.5})
    tokens = sum(float(s.token_fields["loss_mask"].sum()) for s in sequences)
    for batches in per_rank:
        for batch in batches:
            assert batch.meta == {
                "temperature": 0.5,
                "batch_num_tokens": tokens,
                "global_batch_size": 8,
                "dp_size": 2,
                "num_micro_batches": len(batches),
            }


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_copies_that_fill_ranks_change_no_loss_metric_denominator_or_output(mode: str) -> None:
    sequences = random_sequences(random.Random(4), 5)
    longest = max(map(len, sequences))
    values = [torch.arange(len(sequence)).double() for sequence in sequences]
    sequences = [
        TokenSequence(sequence.input_ids, {**sequence.token_fields, "values": value})
        for sequence, value in zip(sequences, values, strict=True)
    ]

    def loss_and_metric(dp_size: int, budget: int, *, fill: bool) -> tuple[float, float]:
        plan = plan_micro_batches([len(s) for s in sequences], dp_size, budget, fill=fill)
        assert bool(plan.fillers) == fill
        per_rank = pack_plan(sequences, plan)
        outputs = [[row for batch in batches for row in batch.split(batch.token_field("values"))] for batches in per_rank]
        for restored, value in zip(restore_order(plan, outputs), values, strict=True):
            assert torch.equal(restored, value)
        loss, sums, weights = 0.0, 0.0, 0.0
        for batch in (batch for batches in per_rank for batch in batches):
            assert batch.meta["global_batch_size"] == 5
            tokens, mask = batch.token_field("values"), batch.token_field("loss_mask")
            loss += aggregate_loss(tokens, mask, batch, mode).item() / dp_size
            share = batch.sequence_fields.get(EPISODE_SHARE)
            part, weight = aggregation_terms(tokens, mask, batch.seq_lens, mode, episode_share=share)
            sums, weights = sums + part.item(), weights + weight.item()
        return loss, sums / weights

    expected = loss_and_metric(1, 999, fill=False)
    assert loss_and_metric(3, longest, fill=True) == pytest.approx(expected, rel=1e-12)
    assert loss_and_metric(8, longest, fill=True) == pytest.approx(expected, rel=1e-12)


def test_without_a_loss_mask_there_is_no_token_count() -> None:
    ((batch,),) = prepare_micro_batches([TokenSequence(torch.arange(3))], 1, 8)
    assert "batch_num_tokens" not in batch.meta


def test_the_callers_denominators_take_precedence() -> None:
    sequences = random_sequences(random.Random(2), 2)
    ((batch,),) = prepare_micro_batches(sequences, 1, 999, {"batch_num_tokens": 77.0, "global_batch_size": 5})
    assert batch.meta["batch_num_tokens"] == 77.0
    assert batch.meta["global_batch_size"] == 5


@pytest.mark.parametrize("name", ["dp_size", "num_micro_batches"])
def test_facts_that_dispatch_decides_are_refused_in_meta(name: str) -> None:
    with pytest.raises(BatchError, match=name):
        prepare_micro_batches(random_sequences(random.Random(3), 2), 1, 999, {name: 1})


def test_a_loss_mask_on_the_last_position_is_refused_with_the_index() -> None:
    good = TokenSequence(torch.arange(3), {"loss_mask": torch.tensor([0.0, 1.0, 0.0])})
    bad = TokenSequence(torch.arange(3), {"loss_mask": torch.tensor([0.0, 1.0, 1.0])})
    with pytest.raises(BatchError, match=r"loss_mask of sequence 1 is 1\.0 at its last position"):
        prepare_micro_batches([good, bad], 1, 64)


def test_fields_that_differ_between_micro_batches_are_refused_too() -> None:
    with_mask = [TokenSequence(torch.arange(8), {"loss_mask": torch.zeros(8)}) for _ in range(2)]
    with pytest.raises(BatchError, match="sequence 2 lacks"):
        prepare_micro_batches([*with_mask, TokenSequence(torch.arange(8))], 1, 8)


def test_a_plan_for_another_batch_is_refused() -> None:
    with pytest.raises(BatchError, match="plan is for 2 sequences; got 1"):
        pack_plan([TokenSequence(torch.arange(3))], plan_micro_batches([3, 3], 1, 8))


def test_outputs_that_do_not_match_the_plan_are_refused() -> None:
    plan = plan_micro_batches([3, 3], 2, 8)
    with pytest.raises(ValueError, match="zip"):
        restore_order(plan, [[1, 2]])
    with pytest.raises(ValueError, match="zip"):
        restore_order(plan, [[1], []])
