"""What the actions of a schedule wait for."""

from __future__ import annotations

import pytest

from rl_backend.contracts import ScheduleError
from rl_backend.pipeline.schedule import Action, Arrival, Event, Kind, arrival_of, event_graph, in_order, inputs_of
from tests.support.pipeline import action, actions


@pytest.mark.parametrize(
    ("name", "present", "expected"),
    [
        ("0F1", "0F1", ""),
        ("2F1", "", "1F1"),
        ("0W3", "", "0B3"),
        ("2W3", "2BW3", "2B3"),
        ("1B2", "2B2 2B1 2BW1", "1F2 2B2"),
        ("1B2", "2BW2 0BW2", "1F2 2BW2"),
        ("1BW2", "2B2", "1F2 2B2"),
        ("0BW2", "1BW2", "0F2 1BW2"),
        # Of the last stage the gradient comes from the loss.
        ("3BW2", "2BW2 3BW2", "3F2"),
        ("3B2", "2B2 3B2", "3F2"),
    ],
)
def test_a_computation_needs_its_stages_forward_pass_and_what_the_neighbour_gives(
    name: str, present: str, expected: str
) -> None:
    assert inputs_of(action(name), set(actions(present))) == list(actions(expected))


@pytest.mark.parametrize(
    ("source", "needing", "expected"),
    [
        ("0F1", "1F1", "1RECV_F1"),
        ("2B1", "1B1", "1RECV_B1"),
        ("2BW1", "1BW1", "1RECV_B1"),
        # Stages 1 and 2 are on one rank.
        ("1F1", "2F1", None),
        ("2BW1", "1BW1 ", "1RECV_B1"),
        ("1F0", "1BW0", None),
        ("1B0", "1W0", None),
    ],
)
def test_a_result_travels_only_between_ranks(source: str, needing: str, expected: str | None) -> None:
    placement = (0, 1, 1, 0) if expected is None else (0, 1, 0, 1)
    found = arrival_of(action(source), action(needing.strip()), placement)
    assert found == (None if expected is None else Arrival(action(expected)))


def waits(graph: dict[Event, list[Event]], name: str) -> set[str]:
    event: Event = Arrival(action(name[1:])) if name.startswith(">") else action(name)
    return {f">{each.receive}" if isinstance(each, Arrival) else str(each) for each in graph[event]}


def test_an_action_waits_for_the_one_before_it_and_for_what_it_needs() -> None:
    first, last = actions("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0BW0"), actions("1RECV_F0 1F0 1RECV_F1 1BW0 1SEND_B0 1F1")
    expected = {
        "0F0": set[str](),
        "0SEND_F0": {"0F0"},
        "0F1": {"0SEND_F0"},
        "0SEND_F1": {"0F1"},
        "0RECV_B0": {"0SEND_F1"},
        "0BW0": {"0RECV_B0", "0F0", ">0RECV_B0"},
        "1RECV_F0": set(),
        "1F0": {"1RECV_F0", ">1RECV_F0"},
        "1RECV_F1": {"1F0"},
        "1BW0": {"1RECV_F1", "1F0"},
        "1SEND_B0": {"1BW0"},
        "1F1": {"1SEND_B0", ">1RECV_F1"},
        ">1RECV_F0": {"1RECV_F0", "0SEND_F0"},
        # Transfers of one direction follow each other; the gradient goes the other way.
        ">1RECV_F1": {"1RECV_F1", "0SEND_F1", ">1RECV_F0"},
        ">0RECV_B0": {"0RECV_B0", "1SEND_B0"},
    }
    graph = event_graph([first, last], (0, 1))
    assert len(graph) == len(expected)
    assert {name: waits(graph, name) for name in expected} == expected
    # Both ranks post the gradient's transfer after those of the forward passes.
    queued = event_graph([first, last], (0, 1), one_queue_per_rank=True)
    expected[">0RECV_B0"] |= {">1RECV_F1"}
    assert {name: waits(queued, name) for name in expected} == expected


def test_a_queue_of_a_rank_is_in_the_order_of_its_own_list() -> None:
    # The second rank posts the gradient's transfer between the two others.
    lists = [actions("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0"), actions("1RECV_F0 1F0 1BW0 1SEND_B0 1RECV_F1")]
    graph = event_graph(lists, (0, 1), one_queue_per_rank=True)
    assert waits(graph, ">1RECV_F1") == {"1RECV_F1", "0SEND_F1", ">1RECV_F0", ">0RECV_B0"}
    assert waits(graph, ">0RECV_B0") == {"0RECV_B0", "1SEND_B0", ">1RECV_F1", ">1RECV_F0"}


def test_without_sends_a_transfer_needs_what_it_brings() -> None:
    graph = event_graph([actions("0F0 0BW0"), actions("1F0 1BW0")], (0, 1))
    expected = {
        "0F0": set[str](),
        "1F0": {">1RECV_F0"},
        ">1RECV_F0": {"0F0"},
        "1BW0": {"1F0"},
        ">0RECV_B0": {"1BW0"},
        "0BW0": {"0F0", ">0RECV_B0"},
    }
    assert {name: waits(graph, name) for name in expected} == expected and len(graph) == len(expected)


def test_the_order_has_each_event_after_those_it_waits_for() -> None:
    graph = event_graph([actions("0F0 0BW0"), actions("1F0 1BW0")], (0, 1))
    found = in_order(graph)
    assert [str(event) for event in found] == [
        "0F0",
        "the transfer 0SEND_F0 -> 1RECV_F0",
        "1F0",
        "1BW0",
        "the transfer 1SEND_B0 -> 0RECV_B0",
        "0BW0",
    ]


@pytest.mark.parametrize("length", [2, 7, 8, 12])
def test_ranks_that_wait_in_a_circle_are_named_up_to_eight(length: int) -> None:
    circle = [Action(Kind.FORWARD, stage, 0) for stage in range(length)]
    graph: dict[Event, list[Event]] = {one: [circle[(one.stage + 1) % length]] for one in circle}
    with pytest.raises(ScheduleError) as failure:
        in_order(graph, lambda event: f"<{event}>")
    begin, _, told = str(failure.value).partition(": ")
    assert begin == "ranks wait for each other for ever"
    named = told.split(" waits for ")
    start = int(named[0][1:-3])
    expected = [f"<{(start + step) % length}F0>" for step in range(length + 1)]
    assert named == (expected if length < 8 else [*expected[:6], "...", expected[-1]])
