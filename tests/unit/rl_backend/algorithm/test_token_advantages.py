"""Rewards, advantages and returns of single tokens: formulas, alignment with a critic's values, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.algorithm import (
    explained_variance,
    gae_advantages,
    kl_in_reward,
    masked_whiten,
    overlong_penalty,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    token_rewards,
)
from rl_backend.contracts import BatchError, ConfigError, PackedBatch, TokenSequence
from tests.support.rl_batches import pack, random_sequences


@pytest.fixture
def batch() -> PackedBatch:
    return pack(random_sequences(41), {})[1]


def gae(batch: PackedBatch, gamma: float = 0.9, lam: float = 0.8, **changed: Tensor) -> tuple[Tensor, Tensor]:
    fields = {"token_rewards": "token_rewards", "values": "old_values", "loss_mask": "loss_mask"}
    tensors = [changed.get(name, batch.token_field(field)) for name, field in fields.items()]
    return gae_advantages(*tensors, batch.seq_lens, gamma, lam)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_gae_is_the_discounted_sum_of_temporal_differences(batch: PackedBatch, gamma: float, lam: float) -> None:
    advantages, returns = gae(batch, gamma, lam)
    fields = ("token_rewards", "old_values", "loss_mask")
    start = 0
    for rewards, values, mask in zip(*(batch.split(batch.token_field(name)) for name in fields), strict=True):
        places = torch.nonzero(mask).flatten().tolist()
        state_values = [*values[places].tolist(), 0.0]
        deltas = [
            rewards[place].item() + gamma * state_values[step + 1] - state_values[step] for step, place in enumerate(places)
        ]
        for step, place in enumerate(places):
            expected = sum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[step:]))
            assert advantages[start + place].item() == pytest.approx(expected, rel=1e-12)
            assert returns[start + place].item() == pytest.approx(expected + state_values[step], rel=1e-12)
        start += len(mask)
    unselected = batch.token_field("loss_mask") == 0
    assert not advantages[unselected].any() and not returns[unselected].any()


def test_a_critic_that_knows_what_is_still_to_come_leaves_no_advantage() -> None:
    # At position t the response's token t + 1 is chosen, so the value of the state there counts the reward of that choice.
    rewards = [0.5, -1.0, 2.0]
    sequence = TokenSequence.from_prompt_and_response([7, 8], [1, 2, 3], response_fields={"rewards": rewards})
    to_come = torch.tensor([9.0, 1.5, 1.0, 2.0, 9.0])
    mask, placed, lengths = sequence.token_fields["loss_mask"], sequence.token_fields["rewards"], torch.tensor([5])
    advantages, returns = gae_advantages(placed, to_come, mask, lengths, 1.0, 0.7)
    assert advantages.tolist() == [0.0] * 5
    assert returns.tolist() == [0.0, 1.5, 1.0, 2.0, 0.0]
    shifted, _ = gae_advantages(placed, to_come.roll(1), mask, lengths, 1.0, 0.7)
    assert shifted.abs().sum() > 1


def test_gae_steps_over_tokens_that_the_policy_did_not_choose() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]), torch.tensor([0.5, 0.4, 99.0, 0.2, 0.1])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    gaps, _ = gae_advantages(rewards, values, mask, torch.tensor([5]), 0.9, 0.8)
    chosen = mask != 0
    close, _ = gae_advantages(rewards[chosen], values[chosen], torch.ones(4), torch.tensor([4]), 0.9, 0.8)
    assert torch.equal(gaps[chosen], close)


def test_sequences_do_not_reach_into_each_other(batch: PackedBatch) -> None:
    whole, _ = gae(batch)
    parts = [gae(pack([sequence], {})[1])[0] for sequence in random_sequences(41)]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_stands_at_masked_positions_is_never_read(batch: PackedBatch, bad: float) -> None:
    mask = batch.token_field("loss_mask")

    def results(fill: Callable[[Tensor], Tensor]) -> list[Tensor]:
        rewards, values, old, ref = (
            fill(batch.token_field(name)) for name in ("token_rewards", "old_values", "old_log_probs", "ref_log_probs")
        )
        return [
            *gae_advantages(rewards, values, mask, batch.seq_lens, 0.9, 0.8),
            masked_whiten(values, mask),
            reinforce_plus_plus_advantages(rewards, mask, batch.seq_lens, 0.9),
            kl_in_reward(rewards, old, ref, mask, kl_coef=0.1),
        ]

    clean, spoilt = results(lambda field: field), results(lambda field: field.masked_fill(mask == 0, bad))
    assert all(torch.equal(one, other) for one, other in zip(clean, spoilt, strict=True))
    assert all((result[mask == 0] == 0).all() for result in spoilt)


def test_no_gradient_goes_into_advantages_and_returns(batch: PackedBatch) -> None:
    values = batch.token_field("old_values").clone().requires_grad_()
    advantages, returns = gae(batch, values=values)
    assert not advantages.requires_grad and not returns.requires_grad
    assert not masked_whiten(values, batch.token_field("loss_mask")).requires_grad


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_of_any_dtype_selects_the_same(batch: PackedBatch, dtype: torch.dtype) -> None:
    mask = batch.token_field("loss_mask").to(dtype)
    assert torch.equal(gae(batch)[0], gae(batch, loss_mask=mask)[0])
    rewards = [float(index) for index in range(batch.num_sequences)]
    assert torch.equal(token_rewards(rewards, mask, batch.seq_lens), token_rewards(rewards, mask.double(), batch.seq_lens))


def test_a_reward_stands_at_the_last_selected_token_and_is_left_out_where_there_is_none() -> None:
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    placed = token_rewards([2.0, 3.0, -1.0], mask, torch.tensor([4, 2, 4]))
    assert placed.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0]
    assert token_rewards(torch.tensor([1, 2]), torch.ones(2), torch.tensor([1, 1])).dtype == torch.float64


def test_kl_is_taken_off_every_response_token() -> None:
    rewards, mask = torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    log_probs, ref = torch.tensor([-9.0, -1.0, -2.0, 0.0]), torch.tensor([-1.0, -1.5, -1.0, 0.0])
    result = kl_in_reward(rewards, log_probs, ref, mask, kl_coef=0.1)
    assert result.tolist() == pytest.approx([0.0, -0.05, 1.1, 0.0])


def test_whitened_values_have_mean_0_and_variance_1_over_selected_tokens_of_the_whole_batch(batch: PackedBatch) -> None:
    mask = batch.token_field("loss_mask")
    chosen = masked_whiten(5 * batch.token_field("returns") - 3, mask)[mask != 0]
    assert chosen.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert chosen.var().item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6])
def test_equal_values_whiten_to_nothing(value: float) -> None:
    assert masked_whiten(torch.full((7,), value, dtype=torch.float64), torch.ones(7)).abs().max() < 1e-9
    alone = torch.tensor([0.0, 1.0, 0.0])
    assert masked_whiten(torch.full((3,), value, dtype=torch.float64), alone).tolist() == [0.0, 0.0, 0.0]
    kept = masked_whiten(torch.full((3,), value, dtype=torch.float64), alone, shift_mean=False)
    assert kept.tolist() == [0.0, value, 0.0]


def test_reinforce_plus_plus_advantages_differ_by_token_and_the_baseline_form_by_response() -> None:
    mask, lengths = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]), torch.tensor([3, 2])
    by_token = reinforce_plus_plus_advantages(torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0]), mask, lengths, gamma=0.5)
    raw = torch.tensor([0.5, 1.0, 3.0])
    torch.testing.assert_close(by_token[mask != 0], (raw - raw.mean()) / raw.std())
    by_response = reinforce_plus_plus_baseline_advantages([1.0, 3.0], mask, lengths, group_size=2)
    raw = torch.tensor([-1.0, -1.0, 1.0])
    torch.testing.assert_close(by_response[mask != 0], (raw - raw.mean()) / raw.std())


def test_overlong_responses_lose_linearly_inside_the_buffer_and_no_more_beyond_it() -> None:
    penalties = overlong_penalty([1, 80, 90, 100, 130], max_response_tokens=100, buffer_tokens=20)
    assert penalties.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    # As exact as Python's own numbers, to which a run adds them.
    assert overlong_penalty([99], max_response_tokens=100, buffer_tokens=10, penalty=0.3).tolist() == [-0.3 * 0.9]


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant_one() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 4.0, float("nan")]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.zeros(4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_discount_outside_0_to_1_is_refused(batch: PackedBatch, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        gae(batch, **{name: value})


@pytest.mark.parametrize("name", ["token_rewards", "values", "loss_mask"])
def test_a_tensor_of_another_length_is_named(batch: PackedBatch, name: str) -> None:
    with pytest.raises(BatchError, match=f"{name} has shape"):
        gae(batch, **{name: torch.ones(batch.num_tokens + 1)})


@pytest.mark.parametrize("name", ["token_rewards", "values"])
def test_a_selected_entry_that_is_not_finite_is_named_with_its_place(batch: PackedBatch, name: str) -> None:
    place = int(torch.nonzero(batch.token_field("loss_mask"))[3])
    spoilt = torch.zeros(batch.num_tokens).index_fill(0, torch.tensor([place]), float("nan"))
    with pytest.raises(BatchError, match=rf"{name}\[{place}\] is nan"):
        gae(batch, **{name: spoilt})


LENGTHS = torch.tensor([2, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: token_rewards([1.0], torch.ones(3), LENGTHS), ValueError, "argument 2 is longer than argument 1"),
        (lambda: token_rewards([1.0, math.nan], torch.ones(3), LENGTHS), BatchError, r"rewards\[1\] is nan"),
        (lambda: token_rewards([1.0, 1.0], torch.ones(4), LENGTHS), BatchError, "loss_mask has shape"),
        (lambda: masked_whiten(torch.ones(3), torch.ones(2)), RuntimeError, "must match the size"),
        (lambda: kl_in_reward(*[torch.ones(3)] * 4, kl_coef=-1.0), ConfigError, "kl_coef=-1.0"),
        (lambda: kl_in_reward(*[torch.ones(3)] * 4, kl_coef=0.1, kl_type="k4"), ConfigError, "kl_type='k4'"),
        (lambda: kl_in_reward(*[torch.ones(3)] * 3, torch.ones(2), kl_coef=0.1), RuntimeError, "must match the size"),
        (lambda: overlong_penalty([1], max_response_tokens=10, buffer_tokens=11), ConfigError, "buffer_tokens=11"),
        (lambda: overlong_penalty([1], max_response_tokens=10, buffer_tokens=0), ConfigError, "buffer_tokens=0"),
        (lambda: overlong_penalty([1], max_response_tokens=10, buffer_tokens=5, penalty=-1), ConfigError, "penalty=-1"),
        (
            lambda: reinforce_plus_plus_baseline_advantages([1.0] * 3, torch.ones(3), LENGTHS, group_size=3),
            RuntimeError,
            "repeats must have the same size",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
