"""Hundreds of episodes at once on running engines, of which some fail."""

from __future__ import annotations

import pytest

from actors.rollout.group.group import RolloutGroup
from actors.sync.push import WeightSync
from benchmarks.environment_failures import EPISODES, LIMITS, measure_over


@pytest.mark.long
@pytest.mark.shows(
    "environments: of 200 episodes at once on vLLM, with steps of 0 to 2 seconds, three that raise and one that hangs end "
    "alone; the others have the tokens that they have one by one"
)
def test_two_hundred_episodes_on_engines_of_which_four_fail(rollout_pair: RolloutGroup, rollout_sync: WeightSync) -> None:
    rollout_sync.push()
    found = measure_over(rollout_pair)
    assert found["stops"] == {"done": EPISODES - 4, "error": 3, "timeout": 1}
    raised, hung = found["errors"]
    assert raised == "ValueError: no such door" and hung == "a step took longer than limits.step_seconds"
    assert found["closed_once"] and found["tokens_equal"] and found["log_probs_apart"] <= 1e-5
    assert LIMITS.step_seconds is not None and found["seconds_at_once"] < found["seconds_of_waits"] / 4
