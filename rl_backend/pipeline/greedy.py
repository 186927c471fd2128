"""Greedy orders: always run what can start first."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rl_backend.contracts import ScheduleError
from rl_backend.pipeline.dependencies import inputs_of
from rl_backend.pipeline.schedule import Action, Kind
from rl_backend.pipeline.simulate import Costs


class _Candidate(NamedTuple):
    start: float
    priority: int
    stages_after: int
    action: Action


def greedy_order(
    placement: Sequence[int],
    num_micro_batches: int,
    costs: Costs,
    bound: Sequence[int],
    begun: Sequence[Sequence[Action]],
    priority: Sequence[Kind],
) -> list[list[Action]]:
    """The computations of each rank: all forward passes, and with split backward passes if ``priority`` has their kinds.

    Args:
        placement: rank of each stage.
        bound: for each rank the most activations that it may hold. One is kept for its last stage, without which no
            micro-batch could come to its end.
        begun: for each rank how its order begins, whatever could start earlier.
        priority: of the kinds among what a rank can start at the same time; of one kind, later stages come first.

    Raises:
        ScheduleError: after ``begun`` nothing can continue.
    """
    ranks, stages = range(len(bound)), range(len(placement))
    orders: list[list[Action]] = [[] for _ in ranks]
    beginnings = [deque(own) for own in begun]
    stages_of = [[stage for stage in stages if placement[stage] == rank] for rank in ranks]
    clock, held = [0.0 for _ in ranks], [0 for _ in ranks]
    done: Counter[tuple[Kind, int]] = Counter()
    ends: dict[Action, float] = {}
    # Backward passes are split in every greedy order: gradients come from those for the inputs.
    gradients = {Action(Kind.BACKWARD_INPUT, stage, index) for stage in stages for index in range(num_micro_batches)}

    def open_to(rank: int) -> Iterator[Action]:
        """The next micro-batch of each stage for each kind, without forward passes beyond the bound."""
        if beginnings[rank]:
            yield beginnings[rank][0]
            return
        for stage in stages_of[rank]:
            room = bound[rank] - held[rank] - (stage != stages_of[rank][-1])
            for kind in priority:
                index = done[kind, stage]
                if index < num_micro_batches and (kind is not Kind.FORWARD or room > 0):
                    yield Action(kind, stage, index)

    def candidate(rank: int, action: Action) -> _Candidate | None:
        start = clock[rank]
        for needed in inputs_of(action, gradients):
            if needed not in ends:
                return None
            start = max(start, ends[needed] + (costs.communication if placement[needed.stage] != rank else 0.0))
        return _Candidate(start, priority.index(action.kind), len(placement) - action.stage, action)

    def best(rank: int) -> _Candidate | None:
        """What the rank starts next, if it can start anything."""
        return min(filter(None, (candidate(rank, action) for action in open_to(rank))), default=None)

    next_of = [best(rank) for rank in ranks]
    for _ in range(len(priority) * len(placement) * num_micro_batches):
        first = min(((one.start, rank, one) for rank, one in enumerate(next_of) if one is not None), default=None)
        if first is None:
            raise ScheduleError("the order that is begun cannot be continued: each rank waits for another")
        start, rank, chosen = first
        action = chosen.action
        if beginnings[rank]:
            beginnings[rank].popleft()
        orders[rank].append(action)
        ends[action] = clock[rank] = start + costs.of(action)
        done[action.kind, action.stage] += 1
        # An activation is held from its forward pass to the end of its backward pass for the weights.
        held[rank] += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD_WEIGHT)
        # What ran can only have opened the way for its own stage and those beside it.
        for changed in {placement[stage] for stage in stages[max(0, action.stage - 1) : action.stage + 2]}:
            next_of[changed] = best(changed)
    return orders
