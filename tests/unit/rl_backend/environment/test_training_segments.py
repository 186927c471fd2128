from __future__ import annotations

import numpy as np
import pytest

from rl_backend.contracts import BatchError
from rl_backend.environment.sampler import EpisodeRecord
from tests.support.token_sources import generation


@pytest.mark.shows("environments: a prompt that begins with all ids so far extends its segment, any other begins one")
def test_a_prompt_that_continues_extends_the_segment() -> None:
    record = EpisodeRecord()
    record.add([1, 2], generation([3, 4], version=5))
    record.add([1, 2, 3, 4, 9], generation([6], version=7))
    (segment,) = record.segments()
    assert segment.token_ids == (1, 2, 3, 4, 9, 6)
    assert segment.sampled == (False, False, True, True, False, True)
    assert segment.log_probs == (0.0, 0.0, -0.04, -0.05, 0.0, -0.07)
    assert segment.versions == (-1, -1, 5, 5, -1, 7)
    assert segment.rewards == (0.0,) * 6 and segment.routes is None


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param([1, 2, 3, 8, 9], id="another-token"),
        pytest.param([1, 2, 3], id="shorter"),
        pytest.param([0, 1, 2, 3, 4], id="shifted"),
        pytest.param([1, 2], id="the-same-prompt-again"),
    ],
)
def test_any_other_prompt_begins_a_segment(prompt: list[int]) -> None:
    record = EpisodeRecord()
    record.add([1, 2], generation([3, 4]))
    record.add(prompt, generation([6]))
    first, second = record.segments()
    assert first.token_ids == (1, 2, 3, 4) and first.sampled == (False, False, True, True)
    assert second.token_ids == (*prompt, 6) and second.sampled == (*[False] * len(prompt), True)


def test_turns_of_two_conversations_extend_the_segment_of_their_own() -> None:
    record = EpisodeRecord()
    record.add([1], generation([2]))
    record.add([7], generation([8]))
    record.add([1, 2, 3], generation([4]))
    assert [segment.token_ids for segment in record.segments()] == [(1, 2, 3, 4), (7, 8)]
    record.reward(1.0)
    assert [segment.rewards for segment in record.segments()] == [(0.0, 0.0, 0.0, 1.0), (0.0, 0.0)]


def test_rewards_lie_at_the_last_token_of_their_turn() -> None:
    record = EpisodeRecord()
    record.add([1, 2], generation([3, 4]))
    record.reward(0.5)
    record.reward(0.25)
    record.add([1, 2, 3, 4, 9], generation([6]))
    record.reward(1.0)
    assert record.segments()[0].rewards == (0.0, 0.0, 0.0, 0.75, 0.0, 1.0)
    with pytest.raises(BatchError, match="nan: rewards must be finite"):
        record.reward(float("nan"))


def test_a_turn_that_is_left_out_becomes_prompt() -> None:
    record = EpisodeRecord()
    record.add([1], generation([2, 3], version=1))
    record.leave_out()
    record.add([1, 2, 3], generation([4], version=2))
    (segment,) = record.segments()
    assert segment.token_ids == (1, 2, 3, 4) and segment.sampled == (False, False, False, True)
    assert segment.versions == (-1, -1, -1, 2) and segment.log_probs == (0.0, 0.0, 0.0, -0.05)


def test_a_row_of_routes_is_that_of_the_pass_that_predicted_the_next_token() -> None:
    def rows(count: int, version: int) -> np.ndarray:
        return np.array([[[row, version]] for row in range(count)], dtype=np.uint8)

    record = EpisodeRecord()
    record.add([1, 2], generation([3, 4], routes=rows(3, version=1)))
    record.add([1, 2, 3, 4, 9], generation([6, 5], routes=rows(6, version=2)))
    routes = record.segments()[0].routes
    assert routes is not None and routes[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert routes[:, 0, 1].tolist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (generation([]), "a turn of 0 tokens"),
        (generation([3], routes=np.zeros((1, 1, 1), dtype=np.uint8)), "'routes': 1"),
        (generation([3]).__class__([3], [], "stop", [0]), "'log_probs': 0"),
        (generation([3]).__class__([3], [0.0], "stop", [0, 0]), "'versions': 2"),
    ],
)
def test_a_generation_that_does_not_add_up_is_refused(turn: object, problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        EpisodeRecord().add([1, 2], turn)  # type: ignore[arg-type]


def test_a_segment_has_the_masks_of_its_turns_in_one_width() -> None:
    record = EpisodeRecord()
    record.add([1, 2], generation([3, 4], mask=np.array([[3], [4]], dtype=np.int32)))
    record.add([1, 2, 3, 4, 9], generation([6], mask=np.array([[5, 6]], dtype=np.int32)))
    mask = record.segments()[0].sampling_mask
    assert mask is not None and mask.dtype == np.int32
    assert mask.tolist() == [[-1, -1], [-1, -1], [3, -1], [4, -1], [-1, -1], [5, 6]]
    with pytest.raises(BatchError, match="'sampling_mask': 1"):
        record.add([7], generation([3, 4], mask=np.array([[3]], dtype=np.int32)))
    record.add([7], generation([8]))
    assert record.segments()[1].sampling_mask is None


def test_routes_of_some_turns_alone_are_refused() -> None:
    record = EpisodeRecord()
    record.add([1], generation([2], routes=np.zeros((1, 1, 1), dtype=np.uint8)))
    with pytest.raises(BatchError, match="some turns of an episode have expert routes"):
        record.add([1, 2], generation([3]))


def test_a_reward_needs_a_turn() -> None:
    with pytest.raises(BatchError, match="no turn yet"):
        EpisodeRecord().reward(1.0)


def test_rewards_and_turns_left_out_are_of_the_turn_that_is_named_in_its_own_segment() -> None:
    record = EpisodeRecord()
    record.add([1], generation([2, 3], version=4))
    record.add([7, 8], generation([9], version=5))
    record.add([1, 2, 3], generation([4, 5], version=6))
    record.reward(0.5, 0)
    record.reward(2.0, 1)
    record.reward(-1.0, -1)
    record.reward(0.25, -3)
    record.leave_out(0)
    first, second = record.segments()
    assert first.rewards == (0.0, 0.0, 0.75, 0.0, -1.0) and second.rewards == (0.0, 0.0, 2.0)
    assert first.sampled == (False, False, False, True, True) and second.sampled == (False, False, True)
    assert first.versions == (-1, -1, -1, 6, 6) and second.versions == (-1, -1, 5)
    assert first.log_probs == (0.0, 0.0, 0.0, -0.05, -0.06)
    record.leave_out(1)
    assert record.segments()[1].sampled == (False, False, False)
    with pytest.raises(BatchError, match="inf: rewards must be finite"):
        record.reward(float("inf"), 0)
    with pytest.raises(BatchError, match="no turn yet"):
        EpisodeRecord().leave_out()


def test_a_prompt_that_continues_several_segments_extends_the_last_and_changes_nothing_that_is_given() -> None:
    record = EpisodeRecord()
    prompt, turn = [1], generation([2])
    record.add(prompt, turn)
    record.add([1, 2, 3], generation([4]))
    record.add([1], generation([2]))
    record.add([1, 2, 5], generation([6]))
    assert [each.token_ids for each in record.segments()] == [(1, 2, 3, 4), (1, 2, 5, 6)]
    assert prompt == [1] and turn.token_ids == [2] and turn.log_probs == [-0.03] and turn.versions == [0]


def test_routes_are_copied_and_asked_for_in_all_turns_of_a_segment() -> None:
    rows = np.arange(6, dtype=np.int16).reshape(3, 2, 1)
    record = EpisodeRecord()
    record.add([1, 2], generation([3, 4], routes=rows))
    before = rows.copy()
    rows[:] = 0
    (segment,) = record.segments()
    assert segment.routes is not None and (segment.routes == before).all() and segment.routes.dtype == np.int16
    mixed = EpisodeRecord()
    mixed.add([1], generation([2]))
    with pytest.raises(BatchError, match="some turns of an episode have expert routes and others have none"):
        mixed.add([1, 2], generation([3], routes=np.zeros((2, 1, 1), dtype=np.uint8)))
    mixed.add([9], generation([3], routes=np.zeros((1, 1, 1), dtype=np.uint8)))
    assert [each.routes is None for each in mixed.segments()] == [True, False]
    with pytest.raises(BatchError, match=r"a turn of 1 tokens after a prompt of 0 has .*at least one token of each"):
        mixed.add([], generation([3]))
    with pytest.raises(BatchError, match=r"'routes': 3}; expected .*'routes': 2}"):
        mixed.add([5], generation([3, 4], routes=np.zeros((3, 1, 1), dtype=np.uint8)))
