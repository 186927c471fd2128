"""ZBV: zero bubble with 1F1B's activations, two stages per rank in a V (arXiv 2401.10241, section 6; arXiv 2405.15362).

Forward, backward for inputs and backward for weights of both stages alternate in the steady state. As in section 3.1 of the
former, several heuristics are tried for the given costs and the best result is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rl_backend.parallel.pipeline.actions import Action, Kind
from rl_backend.parallel.pipeline.costs import Costs
from rl_backend.parallel.pipeline.orders.greedy import greedy_order
from rl_backend.parallel.pipeline.placement import v_placement

FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def orders_for_zbv(pp_size: int, num_micro_batches: int, costs: Costs) -> Iterator[list[list[Action]]]:
    """Orders to choose from: a fixed one, the same with a greedy end, and two that are all greedy.

    The fixed one has no bubble inside any rank when all costs are equal and there are at least ``2 * pp_size - 1``
    micro-batches; with fewer, or with other costs, another is often shorter.
    """
    begun = [_until_last_forward(pp_size, num_micro_batches, rank) for rank in range(pp_size)]
    yield [_finished(own, (rank, 2 * pp_size - 1 - rank), num_micro_batches) for rank, own in enumerate(begun)]
    placement = v_placement(pp_size)
    bound = bound_of_zbv(pp_size, num_micro_batches)
    nothing: list[list[Action]] = [[] for _ in range(pp_size)]
    yield greedy_order(placement, num_micro_batches, costs, bound, begun, (FORWARD, INPUT, WEIGHT))
    yield greedy_order(placement, num_micro_batches, costs, bound, nothing, (FORWARD, INPUT, WEIGHT))
    yield greedy_order(placement, num_micro_batches, costs, bound, nothing, (INPUT, FORWARD, WEIGHT))


def bound_of_zbv(pp_size: int, num_micro_batches: int) -> list[int]:
    """Activations of each rank: 2p, as much as 1F1B's p of stages twice as large."""
    return [2 * min(pp_size, num_micro_batches)] * pp_size


class _Rank:
    """A rank's order as it grows; steps of micro-batches that do not exist are left out."""

    def __init__(self, stages: tuple[int, int], num_micro_batches: int, order: Sequence[Action] = ()) -> None:
        self.order = list(order)
        self._stages = stages
        self._num_micro_batches = num_micro_batches
        self._done = Counter((action.kind, action.stage) for action in order)

    def add(self, chunk: int, *kinds: Kind) -> None:
        """The next micro-batch of a rank's first (0) or last (1) stage."""
        for kind in kinds:
            if self.left(kind, chunk):
                done = self._done[kind, self._stages[chunk]]
                self.order.append(Action(kind, self._stages[chunk], done))
                self._done[kind, self._stages[chunk]] += 1

    def left(self, kind: Kind, chunk: int) -> int:
        return self._num_micro_batches - self._done[kind, self._stages[chunk]]


def _until_last_forward(pp_size: int, num_micro_batches: int, rank: int) -> list[Action]:
    """Warm-up within the bound, then the steady state: one of each kind of each stage in turn."""
    steps = _Rank((rank, 2 * pp_size - 1 - rank), num_micro_batches)
    for _ in range(2 * (pp_size - rank) - 1):
        steps.add(0, FORWARD)
    for _ in range(rank):
        steps.add(1, FORWARD)
        steps.add(0, FORWARD)
    for _ in range(pp_size - rank):
        steps.add(1, FORWARD, INPUT, WEIGHT)
    while steps.left(FORWARD, 0) or steps.left(FORWARD, 1):
        steps.add(0, FORWARD, INPUT, WEIGHT)
        steps.add(1, FORWARD, INPUT, WEIGHT)
    return steps.order


def _finished(begun: Sequence[Action], stages: tuple[int, int], num_micro_batches: int) -> list[Action]:
    """What is left: inputs of both stages in turn, then of the first, with the weights of it in the gaps."""
    steps = _Rank(stages, num_micro_batches, begun)
    while steps.left(INPUT, 1):
        steps.add(0, INPUT)
        steps.add(1, INPUT)
    while steps.left(INPUT, 0):
        steps.add(0, INPUT, WEIGHT)
    for chunk in (1, 0):
        while steps.left(WEIGHT, chunk):
            steps.add(chunk, WEIGHT)
    return steps.order
