"""Episodes as training sequences: each sampled token once, an episode counted once, and advantages over episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl_backend.algorithm import (
    episode_lengths,
    episode_rewards,
    episode_sequences,
    gae_advantages,
    grpo_advantages,
    grpo_loss,
    reinforce_plus_plus_advantages,
    value_loss,
)
from rl_backend.algorithm.loss_aggregation import LOSS_AGG_MODES
from rl_backend.algorithm.sequences import (
    Truncated,
    episode_parts,
    final_values,
    truncated_share,
    with_advantages,
    with_episode_gae,
    with_outputs,
)
from rl_backend.contracts import EPISODE_SHARE, BatchError, ConfigError, ModelOutput, TokenSequence
from rl_backend.data import pack, prepare_micro_batches
from rl_backend.environment import Turn
from tests.support.episodes import episode, segment

HELD = episode(segment([("given", [1, 2]), ("sampled", [3, 4]), ("given", [5]), ("sampled", [6, 7, 8])], rewards=[0.5, 1.0]))
BRANCHED = episode(
    segment([("given", [1, 2]), ("sampled", [3, 4])], rewards=[0.5]),
    segment([("given", [1, 9, 0, 5]), ("sampled", [6, 7, 8])], rewards=[1.0]),
)
"""The turns of ``HELD``, where the template changes the history before the second."""
OTHER = episode(segment([("given", [1]), ("sampled", [2])], rewards=[-1.0]))


def sampled_values(sequences: list[TokenSequence], name: str) -> list[float]:
    """Values of a token field at the predictions of sampled tokens, in order."""
    return [value for each in sequences for value in each.token_fields[name][each.token_fields["loss_mask"] != 0].tolist()]


@pytest.mark.shows("episodes: each sampled token is trained once, where the history holds and where it branches")
def test_every_sampled_token_is_trained_once() -> None:
    for played, count in ((HELD, 1), (BRANCHED, 2)):
        sequences = episode_sequences([played])
        assert len(sequences) == count
        labels = [
            token for each in sequences for token in each.input_ids[1:][each.token_fields["loss_mask"][:-1] != 0].tolist()
        ]
        assert labels == [3, 4, 6, 7, 8]
        assert sampled_values(sequences, "rollout_log_probs") == pytest.approx([-0.3, -0.4, -0.6, -0.7, -0.8])
        assert sampled_values(sequences, "token_rewards") == [0, 0.5, 0, 0, 1.0]
        assert sum(each.sequence_fields[EPISODE_SHARE].item() for each in sequences) == 1


def losses(sequences: list[TokenSequence], mode: str, micro_batches: int = 1) -> tuple[float, list[float], Any]:
    """Policy loss, its gradient at the sampled tokens' log-probs, which depend on the token alone, and its metric."""
    fields = {
        "old_log_probs": [each.input_ids.float().roll(-1) / -9 for each in sequences],
        "advantages": [each.input_ids.float().roll(-1) - 4 for each in sequences],
    }
    most = max(map(len, sequences)) if micro_batches > 1 else 1000
    (batches,) = prepare_micro_batches(with_outputs(sequences, fields), 1, most)
    total, metric, gradients = 0.0, torch.zeros(2), {}
    for batch in batches:
        given = (batch.input_ids.roll(-1) / -10).requires_grad_()
        factor = {"loss_scale_factor": 7.0} if mode.endswith("norm") else {}
        loss, metrics = grpo_loss(ModelOutput(log_probs=given), batch, loss_agg_mode=mode, **factor)
        loss.backward()
        assert given.grad is not None
        total += loss.item()
        metric += torch.tensor(metrics["policy_loss"])
        chosen = batch.token_fields["loss_mask"] != 0
        gradients |= dict(zip(batch.labels[chosen].tolist(), given.grad[chosen].tolist(), strict=True))
    return total, [gradients[token] for token in sorted(gradients)], (metric[0] / metric[1]).item()


@pytest.mark.shows("episodes: a branched episode has the loss and gradients of one whose history held, in every aggregation")
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_branched_episode_is_not_counted_twice(mode: str) -> None:
    held = losses(episode_sequences([HELD, OTHER]), mode)
    for micro_batches in (1, 2):
        branched = losses(episode_sequences([BRANCHED, OTHER]), mode, micro_batches)
        assert branched[0] == pytest.approx(held[0], rel=1e-6)
        assert branched[1] == pytest.approx(held[1], rel=1e-6)
        assert branched[2] == pytest.approx(held[2], rel=1e-6)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_critic_counts_a_branched_episode_once(mode: str) -> None:
    found = []
    for played in (HELD, BRANCHED):
        sequences = episode_sequences([played, OTHER])
        fields = {"returns": [each.input_ids.float().roll(-1) for each in sequences]}
        ((batch,),) = prepare_micro_batches(with_outputs(sequences, fields), 1, 1000)
        factor = {"loss_scale_factor": 7.0} if mode.endswith("norm") else {}
        output = ModelOutput(values=torch.zeros(batch.num_tokens))
        loss, metrics = value_loss(output, batch, cliprange_value=None, loss_agg_mode=mode, **factor)
        total, weight = metrics["value_loss"]  # type: ignore[misc]
        found.append((loss.item(), (total / weight).item()))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.shows("episodes: GRPO compares episodes, and all sequences of one get its advantage")
def test_advantages_compare_episodes() -> None:
    played = [BRANCHED, OTHER, HELD, replace(OTHER, segments=(), reward=5.0)]
    rewards = episode_rewards(played)
    sequences = with_advantages(episode_sequences(played), rewards, "grpo", group_ids=[0, 0, 1, 1])
    expected = grpo_advantages(torch.tensor(rewards), group_size=2)
    found = torch.stack([each.sequence_fields["advantages"] for each in sequences])
    assert torch.equal(found, expected[[0, 0, 1, 2]])  # an episode without sequences counts in its group's mean


@pytest.mark.shows("episodes: PPO goes on over the turns and branches of an episode, and past a cut to the critic's value")
def test_gae_goes_on_over_turns_branches_and_cuts() -> None:
    values = {3: 0.1, 4: 0.2, 6: 0.3, 7: 0.4, 8: 0.5}

    def estimated(played: Any, rewards: list[float] | None = None) -> tuple[list[float], list[float]]:
        sequences = episode_sequences([played])
        old = [torch.tensor([*(values.get(token, 9.0) for token in each.input_ids[1:].tolist()), 0.7]) for each in sequences]
        sequences = with_outputs(sequences, {"old_values": old})
        sequences = with_episode_gae(sequences, rewards or [played.reward], gamma=0.9, lam=0.8)
        return sampled_values(sequences, "advantages"), sampled_values(sequences, "returns")

    def by_hand(behind: float, rewards: list[float]) -> list[float]:
        state, following, returns = [*values.values(), behind], 0.0, []
        for step in reversed(range(5)):
            following = rewards[step] + 0.9 * state[step + 1] - state[step] + 0.9 * 0.8 * following
            returns.append(following + state[step])
        return returns[::-1]

    for played in (HELD, BRANCHED):
        assert estimated(played)[1] == pytest.approx(by_hand(0.0, [0, 0.5, 0, 0, 1.0]), rel=1e-6)
        assert estimated(replace(played, stop="turns"))[1] == pytest.approx(by_hand(0.7, [0, 0.5, 0, 0, 1.0]), rel=1e-6)
        # What a group's score, or a run, adds to the turns' rewards is at the end.
        assert estimated(played, [4.5])[1] == pytest.approx(by_hand(0.0, [0, 0.5, 0, 0, 4.0]), rel=1e-6)
    assert estimated(HELD) == estimated(BRANCHED)


def test_an_episode_that_came_back_to_an_earlier_history_is_refused_where_the_order_of_time_counts() -> None:
    def turn(*token_ids: int) -> Turn:
        return Turn(None, token_ids, [0.0] * len(token_ids), "stop")

    back = replace(
        episode(
            segment([("given", [1]), ("sampled", [2]), ("given", [9]), ("sampled", [5])]),
            segment([("given", [7]), ("sampled", [3, 4])]),
        ),
        turns=[turn(2), turn(3, 4), turn(5)],
    )
    for advantage in ("grpo", "reinforce_plus_plus_baseline"):
        assert len(with_advantages(episode_sequences([back, OTHER]), [1.0, 0.0], advantage, 2)) == 3
    with pytest.raises(BatchError, match="episode 1 came back to a history that it had left"):
        with_advantages(episode_sequences([OTHER, back]), [1.0, 0.0], "reinforce_plus_plus", 2)


def test_a_turn_that_is_left_out_is_not_taken_for_the_next_one() -> None:
    def turn(*token_ids: int, trained: bool = True) -> Turn:
        return Turn(None, token_ids, [0.0] * len(token_ids), "stop", trained=trained)

    mine = episode(
        segment([("given", [1, 5, 6, 4]), ("sampled", [5, 6, 9])]),
        segment([("given", [7]), ("sampled", [3, 4])]),
    )
    for left_out in ((5, 6), (8,), (5, 6, 9)):
        turns = [turn(*left_out, trained=False), turn(5, 6, 9), turn(3, 4)]
        assert episode_lengths(episode_sequences([replace(mine, turns=turns)])).tolist() == [10]


def test_reinforce_plus_plus_steps_over_branches() -> None:
    found = []
    for played in (HELD, BRANCHED):
        sequences = with_advantages(episode_sequences([played, OTHER]), [1.5, -1.0], "reinforce_plus_plus", 1)
        found.append(sampled_values(sequences, "advantages"))
        packed = pack(sequences)
        rewards = packed.token_fields["token_rewards"]
        lengths = episode_lengths(sequences)
        expected = reinforce_plus_plus_advantages(rewards, packed.token_fields["loss_mask"], lengths)
        assert torch.equal(packed.token_fields["advantages"], expected.float())
        baseline = with_advantages(episode_sequences([played, OTHER]), [1.5, -1.0], "reinforce_plus_plus_baseline", 2)
        found.append(sampled_values(baseline, "advantages"))
    assert found[0] == found[2] and found[1] == found[3]


@pytest.mark.parametrize(
    ("truncated", "reward", "trained", "cut"), [("keep", 1.5, 5, True), ("zero", 0.0, 5, False), ("mask", 1.5, 0, False)]
)
def test_what_becomes_of_an_episode_that_was_cut_off(truncated: Truncated, reward: float, trained: int, cut: bool) -> None:
    played = [replace(BRANCHED, stop="tokens"), OTHER]
    assert episode_rewards(played, truncated) == [reward, -1.0]
    sequences = episode_sequences(played, truncated=truncated)
    assert len(sequences) == 3
    assert sum(each.token_fields["loss_mask"].sum().item() for each in sequences[:2]) == trained
    assert [bool(each.sequence_fields["episode_cut"]) for each in sequences] == [cut, cut, False]
    rewards = sum(each.token_fields["token_rewards"].sum().item() for each in sequences[:2])
    assert rewards == (1.5 if truncated == "keep" else 0)
    assert sequences[2].token_fields["loss_mask"].sum() == 1
    last = final_values(sequences, [torch.full((len(each),), 3.0) for each in sequences])
    assert last.tolist() == [3.0 if cut else 0.0, 0.0]


@pytest.mark.parametrize("truncated", ["keep", "zero", "mask"])
@pytest.mark.parametrize(
    ("stop", "is_cut", "goes_on"),
    [
        ("done", False, False),
        ("parse", False, False),
        ("error", False, False),
        ("turns", True, True),
        ("tokens", True, True),
        ("context", True, True),
        ("length", True, True),
        ("tool_calls", True, True),
        ("timeout", True, False),
        ("cancelled", True, False),
    ],
)
def test_each_reason_of_an_end_is_a_cut_or_not_under_each_value_of_truncated(
    stop: Any, is_cut: bool, goes_on: bool, truncated: Truncated
) -> None:
    assert truncated_share([replace(HELD, stop=stop), OTHER]) == is_cut / 2
    played = [OTHER, replace(HELD, stop=stop)]
    zeroed, masked = is_cut and truncated == "zero", is_cut and truncated == "mask"
    assert episode_rewards(played, truncated) == [-1.0, 0.0 if zeroed else 1.5]
    _, mine = episode_sequences(played, truncated=truncated)
    assert mine.token_fields["loss_mask"].sum() == (0 if masked else 5)
    assert mine.token_fields["token_rewards"].sum() == (0 if zeroed or masked else 1.5)
    assert bool(mine.sequence_fields["episode_cut"]) == (goes_on and truncated == "keep")


@pytest.mark.shows("episodes: PPO expects nothing behind an episode that failed and counts as zero, whatever ended it")
@pytest.mark.parametrize("stop", ["timeout", "cancelled", "error"])
def test_an_episode_that_failed_has_no_value_behind_it(stop: Any) -> None:
    sequences = episode_sequences([replace(OTHER, stop=stop), replace(OTHER, stop="turns")])
    assert final_values(sequences, [torch.full((len(each),), 3.0) for each in sequences]).tolist() == [0.0, 3.0]


def test_the_reward_of_a_turn_that_is_left_out_goes_to_the_turn_before() -> None:
    left_out = segment([("given", [1]), ("sampled", [2, 3]), ("given", [4, 5]), ("sampled", [6])], rewards=[0.25, 1.0])
    left_out = replace(left_out, rewards=[0, 0, 0.25, 0, -2.0, 1.0])
    assert sampled_values(episode_sequences([episode(left_out)]), "token_rewards") == [0, -1.75, 1.0]
    first = replace(left_out, sampled=[False, False, False, False, False, True], rewards=[0, 0, 0.5, 0, 0, 1.0])
    assert sampled_values(episode_sequences([episode(first)]), "token_rewards") == [1.5]


def test_log_probs_are_asked_for_of_sampled_tokens_alone() -> None:
    for each in episode_sequences([BRANCHED, HELD, OTHER]):
        ids, targets = each.input_ids.tolist(), each.token_fields["target_ids"].tolist()
        mask = each.token_fields["loss_mask"].tolist()
        assert targets == [ids[place + 1] if wanted else -100 for place, wanted in enumerate(mask)]


def test_updates_have_whole_groups() -> None:
    played = [BRANCHED, OTHER, HELD, HELD, OTHER, BRANCHED]
    sequences = episode_sequences(played)
    parts = episode_parts(sequences, [0, 0, 1, 1, 2, 2], 2)
    assert [[int(each.sequence_fields["episode"]) for each in part] for part in parts] == [[0, 0, 1], [2, 3, 4, 5, 5]]
    assert len(episode_parts(sequences, [0, 0, 1, 1, 2, 2], 3, least=3)) == 2
    assert [len(part) for part in episode_parts(sequences, [0, 0, 1, 1, 2, 2], 3, least=9)] == [8]


def test_updates_leave_masked_episodes_out() -> None:
    cut, groups = replace(BRANCHED, stop="turns"), [0, 0, 1, 1, 2, 2]
    sequences = episode_sequences([cut, cut, HELD, cut, cut, OTHER], truncated="mask")
    assert [[int(each.sequence_fields["episode"]) for each in part] for part in episode_parts(sequences, groups, 3)] == [
        [2],
        [5],
    ]
    (part,) = episode_parts(sequences, groups, 3, least=3)
    assert [int(each.sequence_fields["episode"]) for each in part] == [2, 5]
    with pytest.raises(BatchError, match="none of the 2 sequences that are left of a step has a token to train on"):
        episode_parts(episode_sequences([cut], truncated="mask"), [0], 3)


def test_routes_of_all_turns_go_along() -> None:
    with_routes = segment([("given", [1, 2]), ("sampled", [3]), ("given", [5]), ("sampled", [6])], routes=True)
    (sequence,) = episode_sequences([episode(with_routes)], routes=True)
    assert sequence.token_fields["routed_experts"].shape == (5, 2, 1)
    assert sequence.token_fields["routed_experts_mask"].tolist() == [True] * 4 + [False]
    with pytest.raises(BatchError, match="episode 1: a segment has no routes"):
        episode_sequences([episode(with_routes), HELD], routes=True)


def test_masks_of_all_turns_go_to_the_positions_that_predict_their_tokens() -> None:
    played = segment([("given", [1, 2]), ("sampled", [3]), ("given", [5]), ("sampled", [6])])
    masks = np.array([[-1, -1], [-1, -1], [0, 3], [-1, -1], [6, -1]], dtype=np.int32)
    other = replace(OTHER.segments[0], sampling_mask=np.array([[-1], [2]], dtype=np.int32))
    episodes = [episode(replace(played, sampling_mask=masks)), episode(other)]
    found = [each.token_fields["sampling_mask"].tolist() for each in episode_sequences(episodes)]
    assert found == [[[-1, -1], [0, 3], [-1, -1], [6, -1], [-1, -1]], [[2, -1], [-1, -1]]]
    with pytest.raises(BatchError, match="1 of 2 samples have a mask"):
        episode_sequences([episodes[0], OTHER])


def test_what_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="truncated='drop': must be keep, zero or mask"):
        episode_sequences([HELD], truncated="drop")  # type: ignore[arg-type]
    short = replace(HELD.segments[0], log_probs=[0.0])
    with pytest.raises(BatchError, match="its first dimension must be 8"):
        episode_sequences([episode(short, reward=0.0)])
    with pytest.raises(BatchError, match="the first token of a segment is sampled"):
        episode_sequences([episode(segment([("sampled", [1, 2])]))])
    sequences = episode_sequences([BRANCHED, OTHER])
    with pytest.raises(BatchError, match="those of an episode must stand next to each other"):
        episode_lengths([sequences[0], sequences[2], sequences[1]])
    with pytest.raises(KeyError, match="episode"):
        episode_lengths([TokenSequence(torch.tensor([1]))])
    packed = pack(sequences[:2])
    zeros = torch.zeros(packed.num_tokens)
    with pytest.raises(BatchError, match="final_values must be 2 finite numbers"):
        gae_advantages(zeros, zeros, packed.token_fields["loss_mask"], packed.seq_lens, final_values=torch.zeros(1))


def test_the_share_of_a_sequence_is_that_of_the_sampled_tokens_of_its_episode() -> None:
    long_prompt = segment([("given", list(range(10))), ("sampled", [3, 4])])
    short_prompt = segment([("given", [1, 2]), ("sampled", [5]), ("given", [6, 7, 8]), ("sampled", [9, 2, 3])])
    given_alone = segment([("given", [1, 2, 3, 4])])
    played = [
        episode(long_prompt, given_alone, short_prompt),
        OTHER,
        episode(given_alone),
        episode(short_prompt, long_prompt),
    ]
    sequences = episode_sequences(played)
    shares = [(int(each.sequence_fields["episode"]), each.sequence_fields[EPISODE_SHARE].item()) for each in sequences]
    assert shares == [(0, 2 / 6), (0, 4 / 6), (1, 1.0), (3, 4 / 6), (3, 2 / 6)]


def test_an_episode_without_sequences_leaves_the_others_their_advantages() -> None:
    played = [
        episode(reward=9.0, stop="error"),
        episode(segment([("given", [5]), ("sampled", [6])]), reward=1.0),
        episode(segment([("given", [5]), ("sampled", [7, 8])]), reward=2.0),
        episode(segment([("given", [5]), ("sampled", [9])]), reward=4.0),
    ]
    found = with_advantages(episode_sequences(played), [9.0, 1.0, 2.0, 4.0], "dr_grpo", 4)
    assert [float(each.sequence_fields["advantages"]) for each in found] == [-3.0, -2.0, 0.0]
