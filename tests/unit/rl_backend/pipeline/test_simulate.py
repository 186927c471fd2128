"""Costs, the choice of an order by them, and what a timeline says of idle ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rl_backend.contracts import ConfigError, ScheduleError
from rl_backend.pipeline import Action, Costs, Kind, Span, Timeline, make_schedule, simulate
from rl_backend.pipeline.schedule import Arrival, Order, event_graph
from rl_backend.pipeline.simulate import end_times, shortest
from tests.support.pipeline import action, actions

OF_STAGES = Costs((1.0, 2.0, 4.0), (8.0, 16.0, 32.0), (64.0, 128.0, 256.0))
OF_ALL = Costs(1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("name", "of_stages", "of_all"),
    [("0F7", 1, 1), ("2F0", 4, 1), ("1B3", 16, 2), ("1W0", 128, 4), ("2BW1", 288, 6), ("0BW0", 72, 6)],
)
def test_a_computation_takes_the_time_of_its_kind_and_stage(name: str, of_stages: float, of_all: float) -> None:
    assert OF_STAGES.of(action(name)) == of_stages
    assert OF_ALL.of(action(name)) == of_all
    mixed = Costs(forward=(1.0, 2.0, 4.0), backward_weight=(5.0, 6.0, 7.0))
    assert mixed.of(action("2BW0")) == 8 and mixed.of(action("2B0")) == 1


@pytest.mark.parametrize("name", ["0SEND_F1", "1RECV_F1", "1SEND_B1", "0RECV_B1"])
def test_what_is_no_computation_has_no_time(name: str) -> None:
    with pytest.raises(KeyError):
        OF_ALL.of(action(name))


@pytest.mark.parametrize("field", ["forward", "backward_input", "backward_weight"])
def test_times_of_stages_are_as_many_as_there_are_stages(field: str) -> None:
    given: dict[str, Any] = {field: (1.0, 2.0, 3.0)}
    costs = Costs(**given)
    costs.require_stages(3)
    for stages in (2, 4):
        with pytest.raises(ConfigError, match=rf"^Costs\.{field}=\(1\.0, 2\.0, 3\.0\): has 3 times for {stages} stages$"):
            costs.require_stages(stages)
    Costs().require_stages(5)
    given[field] = (1.0, 2.0, 0.0)
    with pytest.raises(ConfigError, match=rf"^Costs\.{field}=0\.0: must be above 0$"):
        Costs(**given)


def test_the_costs_of_a_step_are_one_each_by_default() -> None:
    assert [getattr(Costs(), name) for name in ("forward", "backward_input", "backward_weight", "communication")] == [
        1.0,
        1.0,
        1.0,
        0.0,
    ]


def test_events_end_as_soon_as_what_they_wait_for_and_their_own_time_allow() -> None:
    lists = [actions("0F0 0SEND_F0 0RECV_B0 0BW0"), actions("1RECV_F0 1F0 1BW0 1SEND_B0")]
    ends = end_times(event_graph(lists, (0, 1)), Costs((2.0, 3.0), 4.0, (5.0, 6.0), 0.5))
    expected = {"0F0": 2.0, "0SEND_F0": 2.0, "1RECV_F0": 0.0, "1F0": 5.5, "1BW0": 15.5, "1SEND_B0": 15.5, "0BW0": 25.0}
    assert {name: ends[action(name)] for name in expected} == expected
    assert ends[Arrival(action("1RECV_F0"))] == 2.5 and ends[Arrival(action("0RECV_B0"))] == 16.0
    with pytest.raises(ScheduleError, match="wait for each other"):
        end_times(event_graph([actions("0BW0 0F0"), actions("1F0 1BW0")], (0, 1)), Costs())


def order(*lists: str) -> Order:
    return [actions(own) for own in lists]


LOOPED, LOOPED_COSTS = (0, 1, 0), Costs((3.0, 1.0, 1.0))
"""Forward passes of a rank with the first and the last of three stages, and costs for which orders differ."""
BEST = order("0F0 0F1 2F0 2F1", "1F0 1F1")
LESS_IDLE, MORE_IDLE = order("0F0 0F1 2F1 2F0", "1F1 1F0"), order("0F0 0F1 2F1 2F0", "1F0 1F1")
"""Both take 9; the second rank idles 0 or 2 between its passes, the first 1."""
WORST = order("0F0 2F0 0F1 2F1", "1F0 1F1")


@pytest.mark.parametrize(
    ("orders", "best"),
    [
        ([WORST, BEST, LESS_IDLE], BEST),
        ([BEST, WORST], BEST),
        ([MORE_IDLE, LESS_IDLE], LESS_IDLE),
        ([LESS_IDLE, MORE_IDLE, WORST], LESS_IDLE),
        ([WORST], WORST),
    ],
    ids=["shorter", "shorter first", "less idle", "less idle first", "alone"],
)
def test_the_shortest_order_is_taken_and_of_equal_ones_that_with_the_least_idle_time(
    orders: Sequence[Order], best: Order
) -> None:
    assert shortest(iter(orders), LOOPED, LOOPED_COSTS) is best


def test_of_orders_that_are_equally_good_the_first_is_taken() -> None:
    same = order("0F1 0F0 2F1 2F0", "1F1 1F0")
    assert shortest([BEST, same], LOOPED, LOOPED_COSTS) is BEST
    assert shortest([same, BEST], LOOPED, LOOPED_COSTS) is same


def test_an_order_without_idle_time_ends_the_search() -> None:
    costs = Costs((1.0, 1.0, 3.0))

    def orders() -> Iterator[Order]:
        yield WORST
        yield BEST
        raise AssertionError("nothing is better")

    assert shortest(orders(), LOOPED, costs) is BEST


def test_a_timeline_counts_from_its_first_start_and_each_rank_from_its_own() -> None:
    forward, backward = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    spans = (
        (Span(forward, 0.5, 1.5), Span(backward, 4.0, 4.5)),
        (Span(forward, 1.0, 3.0), Span(backward, 4.5, 5.0)),
        (Span(forward, 2.0, 6.5),),
    )
    timeline = Timeline(spans, (1, 1, 1))
    assert timeline.makespan == 6.0
    assert timeline.busy == (1.5, 2.5, 4.5)
    assert timeline.bubble_makespan == pytest.approx(1 - 8.5 / 18)
    # Of the first rank's 4 units 2.5 are idle, of the second's 4 only 1.5, of the last's none.
    assert timeline.bubble_span == pytest.approx(2.5 / 4)
    # Rounding is no negative bubble.
    third = Timeline(((Span(forward, 0.0, 0.1), Span(backward, 0.1, 0.1 + 0.2)),), (1,))
    assert third.bubble_span >= 0 and third.bubble_makespan >= 0


def test_a_simulation_has_the_spans_of_computations_and_the_schedules_activations() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    timeline = simulate(schedule, Costs(2.0, 1.0, 3.0, 0.5))
    assert [[(str(span.action), span.start, span.end) for span in own] for own in timeline.spans] == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0BW0", 9, 13), ("0BW1", 15, 19)],
        [("1F0", 2.5, 4.5), ("1BW0", 4.5, 8.5), ("1F1", 8.5, 10.5), ("1BW1", 10.5, 14.5)],
    ]
    assert timeline.peak_activations == schedule.peak_activations == (2, 1)
