"""Transfers in one direction between two ranks go one after the other, in the simulator as on a network."""

from __future__ import annotations

import pytest

from rl_backend.pipeline import Costs, make_schedule, simulate


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_transfer_waits_for_the_one_before_it_in_its_direction(micro_batches: int) -> None:
    costs = Costs(communication=5.0)
    schedule = make_schedule("1f1b", 2, micro_batches, forward_only=True, costs=costs)
    _, last = simulate(schedule, costs).spans
    # The first rank is done with a forward pass every unit of time; its link carries one result every five.
    assert [span.start for span in last] == [1.0 + 5.0 * (index + 1) for index in range(micro_batches)]
