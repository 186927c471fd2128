"""The beginning of a pipeline pass that can be abandoned."""

from __future__ import annotations

import pytest

from rl_backend.pipeline.catalog import SCHEDULES, make_schedule
from rl_backend.pipeline.dependencies import event_graph, in_order, plan_warm_up
from rl_backend.pipeline.schedule import COMPUTATIONS, RECEIVES, Action, Kind, Schedule


def abandoned(schedule: Schedule) -> list[tuple[Action, ...]]:
    """What each rank does in a pass that ends after its warm-up."""
    warm_up = plan_warm_up(schedule)
    return [(*own[:length], *left_over) for own, length, left_over in zip(schedule.actions, *warm_up, strict=True)]


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_abandoned_pass_leaves_no_transfer_open_and_nobody_waiting(name: str, pp: int) -> None:
    for num_micro_batches in (2 * pp, 4 * pp):
        schedule = make_schedule(name, pp, num_micro_batches)
        actions = abandoned(schedule)
        done = {action for own in actions for action in own}
        for action in done - {action for action in done if action.kind in COMPUTATIONS}:
            assert action.other_end in done
        for action in done:
            if action.kind is Kind.FORWARD and action.stage:
                assert Action(Kind.FORWARD, action.stage - 1, action.micro_batch) in done
        in_order(event_graph(actions, schedule.placement, one_queue_per_rank=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_has_all_forward_passes_before_the_first_loss_and_backward_pass(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    lengths = plan_warm_up(schedule).lengths
    for own, length in zip(schedule.actions, lengths, strict=True):
        computed = [action for action in own[:length] if action.kind in COMPUTATIONS]
        assert all(action.kind is Kind.FORWARD and action.stage + 1 < schedule.num_stages for action in computed)
        following = own[length]
        assert following.kind is not Kind.FORWARD or following.stage + 1 == schedule.num_stages
    assert lengths[0] > 0


def test_a_forward_pass_that_needs_what_comes_later_is_no_part_of_a_warm_up() -> None:
    late, early = Action(Kind.FORWARD, 0, 1), Action(Kind.FORWARD, 0, 0)
    send = Action(Kind.SEND_ACTIVATION, 0, 1)
    first = (early, Action(Kind.BACKWARD, 0, 0), late, send)
    second = (send.other_end, Action(Kind.FORWARD, 1, 1), Action(Kind.FORWARD, 1, 0))
    warm_up = plan_warm_up(Schedule("begun", 2, (0, 1, 0), (first, second), (2, 2)))
    assert warm_up.lengths == (1, 1)
    assert warm_up.left_over == ((send,), ())
    assert second[0].kind in RECEIVES
