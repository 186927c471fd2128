"""Times of the computations of each rank before sends and receives are placed, and the choice of an order by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rl_backend.parallel.pipeline.actions import Action
from rl_backend.parallel.pipeline.costs import Costs
from rl_backend.parallel.pipeline.dependencies import Event, in_order, inputs_of
from rl_backend.parallel.pipeline.schedule import Order


def end_times(order: Order, placement: Sequence[int], costs: Costs) -> Mapping[Action, float]:
    """When each computation ends if each starts as soon as its rank is free and its inputs have arrived.

    Raises:
        ScheduleError: the computations wait for each other.
    """
    before = {action: previous for own in order for previous, action in zip((None, *own), own, strict=False)}
    inputs = {action: inputs_of(action, before) for action in before}
    graph: dict[Event, list[Event]] = {
        action: [*inputs[action], *([previous] if previous is not None else [])] for action, previous in before.items()
    }
    ends: dict[Action, float] = {}
    for action in in_order(graph):
        assert isinstance(action, Action)
        previous = before[action]
        start = 0.0 if previous is None else ends[previous]
        for one in inputs[action]:
            delay = costs.communication if placement[one.stage] != placement[action.stage] else 0.0
            start = max(start, ends[one] + delay)
        ends[action] = start + costs.of(action)
    return ends


def shortest(orders: Iterable[Order], placement: Sequence[int], costs: Costs) -> Order:
    """The order with the shortest makespan, and of equal ones that with the least idle time inside a rank.

    An order that nothing can be better than ends the search.
    """
    best: tuple[tuple[float, float], Order] | None = None
    for order in orders:
        times, perfect = _times(order, placement, costs)
        if best is None or times < best[0]:
            best = times, order
        if perfect:
            break
    if best is None:
        raise ValueError("no order to choose from")
    return best[1]


def _times(order: Order, placement: Sequence[int], costs: Costs) -> tuple[tuple[float, float], bool]:
    """Makespan and longest idle time inside a rank, and whether every rank starts as early as it can and never idles."""
    ends = end_times(order, placement, costs)
    makespan = max(ends[own[-1]] for own in order)
    idle = [ends[own[-1]] - ends[own[0]] + costs.of(own[0]) - sum(map(costs.of, own)) for own in order]
    # Rounded, so that the order of additions does not decide.
    return (round(makespan, 9), round(max(idle), 9)), max(idle) < 1e-9 * makespan
