"""Orders of computations as the papers and repositories give them, action by action."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.pipeline import Action, Costs, Kind, make_schedule, require_stages
from rl_backend.pipeline.catalog import SCHEDULES, with_communication
from rl_backend.pipeline.orders import greedy_order, interleaved, orders_for_zbv, zb_h1, zb_h2
from rl_backend.pipeline.schedule import loop_placement, v_placement
from tests.support.pipeline import action, actions

F, B, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT

type Case = tuple[str, int, int, int | None]

EXPECTED: dict[Case, tuple[str, ...]] = {
    ("1f1b", 3, 4, None): (
        "0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3",
        "1F0 1F1 1BW0 1F2 1BW1 1F3 1BW2 1BW3",
        "2F0 2BW0 2F1 2BW1 2F2 2BW2 2F3 2BW3",
    ),
    # Fewer micro-batches than a rank would run ahead.
    ("1f1b", 3, 2, None): ("0F0 0F1 0BW0 0BW1", "1F0 1F1 1BW0 1BW1", "2F0 2BW0 2F1 2BW1"),
    ("interleaved-1f1b", 2, 4, 2): (
        "0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 2BW2 2BW3 0BW2 0BW3",
        "1F0 1F1 3F0 3BW0 3F1 3BW1 1F2 1BW0 1F3 1BW1 3F2 3BW2 3F3 3BW3 1BW2 1BW3",
    ),
    ("interleaved-1f1b", 2, 2, 3): (
        "0F0 0F1 2F0 2F1 4F0 4F1 4BW0 4BW1 2BW0 2BW1 0BW0 0BW1",
        "1F0 1F1 3F0 3F1 5F0 5BW0 5F1 5BW1 3BW0 3BW1 1BW0 1BW1",
    ),
    ("zb-h1", 3, 4, None): (
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ),
    # The last rank would put off more weights than there are.
    ("zb-h1", 3, 1, None): ("0F0 0B0 0W0", "1F0 1B0 1W0", "2F0 2B0 2W0"),
    ("zb-h2", 2, 4, None): (
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1W0 1F3 1B3 1W1 1W2 1W3",
    ),
    # DeepSeek's repository: warm-up, zero bubble, pairs, and weights in the gaps of the end.
    ("dualpipev", 3, 6, 2): (
        "0F0 0F1 0F2 0F3 0F4 5F0 5B0 5W0 5F1 5B1 5W1 5F2 0F5 5BW2 5F3 0BW0 5BW3 5F4 0BW1 5BW4 5F5 0BW2 5BW5 "
        "0B3 0W3 0B4 0W4 0B5 0W5",
        "1F0 1F1 1F2 4F0 1F3 4F1 4B0 4W0 4F2 1F4 4BW1 4F3 1BW0 1F5 4BW2 4F4 1BW1 4BW3 4F5 1BW2 4BW4 1BW3 "
        "4B5 1B4 4W5 1B5 1W4 1W5",
        "2F0 3F0 2F1 3F1 2F2 3F2 2F3 3BW0 3F3 2BW0 2F4 3BW1 3F4 2BW1 2F5 3BW2 3F5 2BW2 3BW3 2BW3 3BW4 "
        "2B4 3B5 2B5 2W4 3W5 2W5",
    ),
    ("zbv", 2, 4, 2): (
        "0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 0W0 3F2 3B2 3W2 0B1 0W1 3F3 3B3 3W3 0B2 0W2 0B3 0W3",
        "1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3",
    ),
}


@pytest.mark.parametrize("case", EXPECTED, ids=str)
def test_an_algorithm_gives_its_order(case: Case) -> None:
    name, pp_size, num_micro_batches, stages = case
    schedule = make_schedule(name, pp_size, num_micro_batches, stages_per_rank=stages)
    assert str(schedule) == "\n".join(f"{rank}: {own}" for rank, own in enumerate(EXPECTED[case]))
    assert (schedule.name, schedule.pp_size, schedule.num_micro_batches) == case[:3]


@pytest.mark.parametrize(
    ("name", "sizes", "bound"),
    [
        ("1f1b", (4, 9, 1), [4, 3, 2, 1]),
        ("1f1b", (4, 2, 1), [2, 2, 2, 1]),
        ("interleaved-1f1b", (3, 12, 2), [8, 6, 4]),
        ("interleaved-1f1b", (3, 3, 2), [6, 6, 4]),
        ("interleaved-1f1b", (2, 8, 4), [9, 7]),
        ("zb-h1", (3, 9, 1), [3, 3, 3]),
        ("zb-h1", (3, 2, 1), [2, 2, 2]),
        ("zb-h2", (3, 9, 1), [5, 5, 5]),
        ("zb-h2", (3, 4, 1), [4, 4, 4]),
        ("zbv", (3, 9, 2), [6, 6, 6]),
        ("zbv", (3, 2, 2), [4, 4, 4]),
        ("dualpipev", (3, 9, 2), [7, 7, 7]),
    ],
    ids=str,
)
def test_a_rank_may_hold_what_its_algorithm_needs(name: str, sizes: tuple[int, int, int], bound: list[int]) -> None:
    assert [*SCHEDULES[name].bound(*sizes)] == bound


def test_stages_go_round_the_ranks_or_there_and_back() -> None:
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2) and loop_placement(2, 3) == (0, 1, 0, 1, 0, 1)
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert interleaved(3, 3, 2)[1][0] == action("1F0")
    assert [len(own) for own in (*zb_h1(2, 5), *zb_h2(2, 5))] == [15] * 4


def test_there_are_four_orders_of_a_v_to_choose_from() -> None:
    costs = Costs(1.0, 1.0, 2.0)
    orders = list(orders_for_zbv(2, 5, costs))
    assert len(orders) == 4
    every = {Action(kind, stage, index) for kind in (F, B, W) for stage in range(4) for index in range(5)}
    for order in orders:
        assert {*order[0], *order[1]} == every and len(order[0]) == len(order[1]) == 30
        assert {one.stage for one in order[0]} == {0, 3}
    fixed, continued, forward_first, gradients_first = orders
    # The greedy end begins after the last forward pass of the fixed order.
    for rank in range(2):
        last = max(place for place, one in enumerate(fixed[rank]) if one.kind is Kind.FORWARD)
        assert continued[rank][: last + 1] == fixed[rank][: last + 1]
    assert len({str(order) for order in (continued, forward_first, gradients_first)}) == 3


GREEDY: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # One activation at a time on the last rank, two on the first.
    "as 1F1B": (
        {"placement": (0, 1), "bound": (2, 1), "priority": (F, B, W)},
        ("0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2", "1F0 1B0 1W0 1F1 1B1 1W1 1F2 1B2 1W2"),
    ),
    "gradients first": (
        {"placement": (0, 1), "bound": (9, 9), "priority": (B, F, W)},
        ("0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2", "1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2"),
    ),
    # Gradients arrive before a rank has come to the weights that it put off.
    "dear transfers": (
        {"placement": (0, 1), "bound": (9, 9), "priority": (F, B, W), "costs": Costs(communication=3.0)},
        ("0F0 0F1 0F2 0B0 0B1 0B2 0W0 0W1 0W2", "1F0 1F1 1F2 1B0 1B1 1B2 1W0 1W1 1W2"),
    ),
    "forward passes alone, in a V": (
        {"placement": (0, 1, 1, 0), "bound": (9, 9), "priority": (F,)},
        ("0F0 0F1 0F2 3F0 3F1 3F2", "1F0 2F0 1F1 2F1 1F2 2F2"),
    ),
    # The last place is kept for the last stage.
    "a V with three activations": (
        {"placement": (0, 1, 1, 0), "bound": (3, 3), "priority": (F, B, W), "count": 2},
        ("0F0 0F1 3F0 3B0 3W0 0B0 0W0 3F1 3B1 3W1 0B1 0W1", "1F0 2F0 2B0 1B0 2W0 1F1 2F1 1W0 2B1 1B1 2W1 1W1"),
    ),
    "a beginning that nobody would choose": (
        {"placement": (0, 1), "bound": (9, 9), "priority": (F, B, W), "begun": ("0F1 0F0", "1F0 1B0 1W0")},
        ("0F1 0F0 0F2 0B0 0W0 0B1 0B2 0W1 0W2", "1F0 1B0 1W0 1F1 1F2 1B1 1B2 1W1 1W2"),
    ),
}


def greedy(
    placement: Any, bound: Any, priority: Any, costs: Costs | None = None, begun: Any = ("", ""), count: int = 3
) -> Any:
    return greedy_order(placement, count, costs or Costs(), bound, [actions(own) for own in begun], priority)


@pytest.mark.parametrize("case", GREEDY)
def test_a_greedy_order_runs_what_can_start_first(case: str) -> None:
    arguments, expected = GREEDY[case]
    assert [" ".join(map(str, own)) for own in greedy(**arguments)] == list(expected)


def test_a_result_is_sent_at_once_and_its_receive_posted_before_what_runs_then() -> None:
    order = [actions("0F0 0F1 3F0 3F1"), actions("1F0 2F0 1F1 2F1")]
    found = with_communication(order, (0, 1, 1, 0), Costs((2.0, 1.0, 1.0, 1.0)))
    assert [" ".join(map(str, own)) for own in found] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1",
        "1RECV_F0 1F0 2F0 1RECV_F1 2SEND_F0 1F1 2F1 2SEND_F1",
    ]


def test_an_algorithm_is_given_back_for_the_stages_that_it_can_do() -> None:
    for name, stages in (("1f1b", 1), ("zb-h2", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 5), ("zbv", 2)):
        assert require_stages(name, 3, stages) is SCHEDULES[name]
        assert require_stages(name, 1) is SCHEDULES[name]
    assert make_schedule("interleaved-1f1b", 2, 2).stages_per_rank == 2
    assert make_schedule("1f1b", 2, 1).num_micro_batches == 1
