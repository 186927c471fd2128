"""Training sequences of samples, advantages onto them and onto episodes, and what the updates of a step train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rl_backend.algorithm import dr_grpo_advantages, episode_sequences, grpo_advantages, rloo_advantages
from rl_backend.algorithm.sequences import (
    kl_metrics,
    rewards_of_tokens,
    to_sequences,
    update_parts,
    with_advantages,
    with_episode_gae,
    with_outputs,
)
from rl_backend.contracts import BatchError, TokenSequence
from tests.support.episodes import episode, segment


@dataclass
class Sampled:
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    log_probs: Sequence[float]
    sampling_mask: None = None

    def with_routes(self, sequence: TokenSequence) -> TokenSequence:
        return sequence.with_fields({"routes": sequence.input_ids + 100})


SAMPLES = [Sampled([5, 6], [7], [-0.5]), Sampled([1], [2, 3, 4], [-0.1, -0.2, -0.3])]


@pytest.mark.parametrize("routes", [False, True])
def test_samples_become_sequences_with_their_routes_if_asked(routes: bool) -> None:
    sequences = to_sequences(SAMPLES, routes=routes)
    assert [each.input_ids.tolist() for each in sequences] == [[5, 6, 7], [1, 2, 3, 4]]
    assert [each.token_fields["loss_mask"].tolist() for each in sequences] == [[0, 1, 0], [1, 1, 1, 0]]
    # Log-probs of the prompt's tokens are not asked for.
    assert [each.token_fields["target_ids"].tolist() for each in sequences] == [[-100, 7, -100], [2, 3, 4, -100]]
    found = [each.token_fields["rollout_log_probs"].tolist() for each in sequences]
    assert found == [pytest.approx([0, -0.5, 0]), pytest.approx([-0.1, -0.2, -0.3, 0])]
    assert ["routes" in each.token_fields for each in sequences] == [routes] * 2
    if routes:
        assert [each.token_fields["routes"].tolist() for each in sequences] == [[105, 106, 107], [101, 102, 103, 104]]


def test_every_output_goes_to_its_own_sequence() -> None:
    sequences = to_sequences(SAMPLES)
    outputs = {name: [factor * each.input_ids.float() for each in sequences] for name, factor in (("a", 1.0), ("b", -1.0))}
    for before, found in zip(sequences, with_outputs(sequences, outputs), strict=True):
        assert torch.equal(found.token_fields["a"], before.input_ids.float())
        assert torch.equal(found.token_fields["b"], -before.input_ids.float())
        assert "loss_mask" in found.token_fields and "a" not in before.token_fields


def responses(*lengths: int) -> list[TokenSequence]:
    return [TokenSequence.from_prompt_and_response([5] * (index + 1), [6] * n) for index, n in enumerate(lengths)]


REWARDS = [1.0, 5.0, 2.0, -4.0, 0.5, 9.0]


@pytest.mark.parametrize(
    ("advantage", "estimator"), [("grpo", grpo_advantages), ("dr_grpo", dr_grpo_advantages), ("rloo", rloo_advantages)]
)
@pytest.mark.parametrize("groups", [{"group_size": 3}, {"group_ids": [0, 1, 0, 1, 1, 0]}])
def test_one_advantage_of_each_response_is_a_sequence_field(advantage: Any, estimator: Any, groups: dict[str, Any]) -> None:
    found = with_advantages(responses(1, 2, 3, 1, 2, 3), REWARDS, advantage, **groups)
    expected = estimator(REWARDS, **groups)
    assert torch.equal(torch.stack([each.sequence_fields["advantages"] for each in found]), expected)
    assert expected.dtype == torch.float32 and all("advantages" not in each.token_fields for each in found)


@pytest.mark.parametrize("groups", [{"group_size": 2}, {"group_ids": [0, 1, 1, 0]}])
def test_the_baseline_form_is_whitened_over_tokens(groups: dict[str, Any]) -> None:
    lengths, rewards = (1, 3, 2, 2), [1.0, 4.0, -2.0, 3.0]
    found = with_advantages(responses(*lengths), rewards, "reinforce_plus_plus_baseline", **groups)
    pairs = ((0, 1), (2, 3)) if "group_size" in groups else ((0, 3), (1, 2))
    centered = [0.0] * 4
    for one, other in pairs:
        mean = (rewards[one] + rewards[other]) / 2
        centered[one], centered[other] = rewards[one] - mean, rewards[other] - mean
    of_tokens = torch.tensor([value for value, n in zip(centered, lengths, strict=True) for _ in range(n)]).double()
    white = ((of_tokens - of_tokens.mean()) / (of_tokens.var() + 1e-8).sqrt()).float()
    got = torch.cat([each.token_fields["advantages"][each.token_fields["loss_mask"] != 0] for each in found])
    torch.testing.assert_close(got, white)
    assert got.dtype == torch.float32


def with_log_probs(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Of the old policy and of a reference; not numbers where nothing is trained."""
    found = []
    for each in sequences:
        mask = each.token_fields["loss_mask"] != 0
        places = torch.arange(len(each)).double()
        fields = {"old_log_probs": -0.3 * places, "ref_log_probs": -0.1 * places - 0.2}
        nan = torch.tensor(float("nan"), dtype=torch.float64)
        found.append(each.with_fields({name: torch.where(mask, value, nan) for name, value in fields.items()}))
    return found


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_reinforce_plus_plus_takes_the_kl_off_every_token(kl_coef: float) -> None:
    sequences = with_log_probs(responses(2, 1))
    found = with_advantages(sequences, [3.0, -1.0], "reinforce_plus_plus", 2, kl_coef=kl_coef)
    # Places 0, 1 of the first sequence and 1 of the second are trained; the estimate of the KL is the difference.
    kl = [-0.3 * place + 0.1 * place + 0.2 for place in (0, 1, 1)]
    last, other = 3.0 - kl_coef * kl[1], -1.0 - kl_coef * kl[2]
    returns = torch.tensor([last - kl_coef * kl[0], last, other], dtype=torch.float64)
    white = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    got = torch.cat([each.token_fields["advantages"][each.token_fields["loss_mask"] != 0] for each in found])
    torch.testing.assert_close(got, white.float())


def test_what_an_episodes_turns_do_not_add_up_to_is_at_its_last_token() -> None:
    sequences = episode_sequences(
        [episode(segment([("given", [1]), ("sampled", [2, 3]), ("given", [4]), ("sampled", [5])]))]
    )
    (mine,) = sequences
    fields = {**mine.token_fields, "token_rewards": torch.tensor([0.0, 0.25, 9.0, 1.0, 9.0], dtype=torch.float64)}
    found = rewards_of_tokens(fields, torch.tensor([5]), [3.0], 0.0)
    assert found.tolist() == [0.0, 0.25, 0.0, 2.75, 0.0] and found.dtype == torch.float64
    del fields["token_rewards"]
    assert rewards_of_tokens(fields, torch.tensor([5]), [3.0], 0.0).tolist() == [0.0, 0.0, 0.0, 3.0, 0.0]


def by_hand(rewards: list[float], values: list[float], behind: float, gamma: float, lam: float) -> list[float]:
    """Returns of one episode."""
    following, state, found = 0.0, [*values, behind], []
    for step in reversed(range(len(values))):
        following = rewards[step] + gamma * state[step + 1] - state[step] + gamma * lam * following
        found.append(following + state[step])
    return found[::-1]


@pytest.mark.parametrize("kl_coef", [0.0, 0.4])
def test_gae_of_several_episodes_of_which_some_have_no_sequence_and_some_were_cut(kl_coef: float) -> None:
    one = episode(segment([("given", [1]), ("sampled", [2, 3])], rewards=[1.0]), stop="turns")
    two = episode(segment([("given", [1, 2]), ("sampled", [4])], rewards=[-2.0]))
    none = replace(two, segments=())
    sequences = episode_sequences([none, one, none, two, one])
    sequences = with_log_probs([each.with_fields({"old_values": 0.1 * each.input_ids.double() + 0.5}) for each in sequences])
    rewards = [7.0, 1.5, 8.0, -2.0, 0.25]
    found = with_episode_gae(sequences, rewards, gamma=0.9, lam=0.6, kl_coef=kl_coef)
    expected = []
    for own, start, ids, cut in ((1.5, 0, [1, 2, 3], True), (-2.0, 1, [1, 2, 4], False), (0.25, 0, [1, 2, 3], True)):
        places = range(start, 2)
        kl = [-0.2 * place + 0.2 for place in places]
        values = [0.1 * ids[place] + 0.5 for place in places]
        given = [*[0.0] * (len(places) - 1), own]
        taken = [reward - kl_coef * each for reward, each in zip(given, kl, strict=True)]
        expected += by_hand(taken, values, 0.8 if cut else 0.0, 0.9, 0.6)
    masks = [each.token_fields["loss_mask"] != 0 for each in found]
    got = torch.cat([each.token_fields["returns"][mask] for each, mask in zip(found, masks, strict=True)])
    assert got.tolist() == pytest.approx(expected, rel=1e-6) and got.dtype == torch.float32
    advantages = torch.cat([each.token_fields["advantages"][mask] for each, mask in zip(found, masks, strict=True)]).double()
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-6) and advantages.var().item() == pytest.approx(
        1.0, rel=1e-5
    )
    assert all(not each.token_fields["returns"][~mask].any() for each, mask in zip(found, masks, strict=True))


def test_the_kl_metric_is_the_mean_over_response_tokens_of_all_sequences() -> None:
    sequences = with_log_probs(responses(2, 1, 3))
    differences = [-0.2 * place + 0.2 for place in (0, 1, 1, 2, 3, 4)]
    expected = [torch.tensor(-each).double().exp().item() - 1 + each for each in differences]
    assert kl_metrics(sequences) == {"kl": pytest.approx(sum(expected) / 6, rel=1e-6)}


def test_the_updates_of_a_step_share_what_is_left_of_it() -> None:
    assert [list(part) for part in update_parts(range(16), 2, 4, 1)] == [list(range(4 * i, 4 * i + 4)) for i in range(4)]
    assert [len(part) for part in update_parts(range(10), 2, 4, 1)] == [2, 2, 2, 4]
    assert [len(part) for part in update_parts(range(4), 2, 4, 1)] == [2, 2]
    assert [len(part) for part in update_parts(range(10), 2, 4, 3)] == [4, 6]
    assert [list(part) for part in update_parts(range(2), 2, 4, 3)] == [[0, 1]]
    with pytest.raises(BatchError, match="1 responses are left of a step; an update needs a group of 2"):
        list(update_parts(range(1), 2, 4, 3))


@pytest.mark.parametrize(
    ("sequences", "group", "updates", "ranks", "sizes"),
    [
        (21, 3, 3, 1, [6, 6, 9]),
        (20, 3, 3, 1, [6, 6, 6]),
        (12, 3, 4, 3, [3, 3, 3, 3]),
        (12, 3, 4, 4, [6, 6]),
        (15, 3, 4, 6, [6, 9]),
        (9, 3, 1, 1, [9]),
        (3, 3, 5, 8, [3]),
    ],
)
def test_each_rank_has_a_sequence_in_each_update(
    sequences: int, group: int, updates: int, ranks: int, sizes: list[int]
) -> None:
    parts = [list(part) for part in update_parts(range(sequences), group, updates, ranks)]
    assert [len(part) for part in parts] == sizes
    assert [each for part in parts for each in part] == list(range(sum(sizes)))
