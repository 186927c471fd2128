"""Puts sends and receives between the computations of a schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rl_backend.parallel.pipeline.actions import Action, Kind
from rl_backend.parallel.pipeline.costs import Costs
from rl_backend.parallel.pipeline.schedule import Order
from rl_backend.parallel.pipeline.timing import end_times

SEND = {
    Kind.FORWARD: Kind.SEND_ACTIVATION,
    Kind.BACKWARD: Kind.SEND_GRADIENT,
    Kind.BACKWARD_INPUT: Kind.SEND_GRADIENT,
}


def with_communication(order: Order, placement: Sequence[int], costs: Costs) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank: its computations, what it sends to other ranks and what it receives from them.

    A result is sent right after its computation. Its receive is posted before what the receiver is expected to compute at
    that moment, so that the transfer need not wait for the end of it. As both ends keep the order of the moments, no two
    ranks can wait for each other, whatever the computations take in fact.

    Raises:
        ScheduleError: the computations wait for each other.
    """
    ends = end_times(order, placement, costs)
    clocks = [[ends[action] for action in own] for own in order]
    gaps: list[list[list[Action]]] = [[[] for _ in range(len(own) + 1)] for own in order]
    for action in sorted(ends, key=lambda action: (ends[action], action.stage)):
        if action.kind not in SEND:
            continue
        send = Action(SEND[action.kind], action.stage, action.micro_batch)
        receive = send.other_end
        if not 0 <= receive.stage < len(placement) or placement[receive.stage] == placement[send.stage]:
            continue
        for end in (send, receive):
            rank = placement[end.stage]
            gaps[rank][bisect_right(clocks[rank], ends[action])].append(end)
    return tuple(
        tuple(action for index, gap in enumerate(of_rank) for action in (*gap, *own[index : index + 1]))
        for of_rank, own in zip(gaps, order, strict=True)
    )
