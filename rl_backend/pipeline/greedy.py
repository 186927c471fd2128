"""Greedy orders: always run what can start first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    state = _State(placement, num_micro_batches, costs, bound, begun, priority)
    next_of = [state.best(rank) for rank in range(len(bound))]
    for _ in range(len(priority) * len(placement) * num_micro_batches):
        first = min(((one.start, rank, one) for rank, one in enumerate(next_of) if one is not None), default=None)
        if first is None:
            raise ScheduleError("the order that is begun cannot be continued: each rank waits for another")
        _, rank, chosen = first
        state.run(rank, chosen)
        # What ran can only have opened the way for its own stage and those beside it.
        neighbours = range(max(0, chosen.action.stage - 1), min(len(placement), chosen.action.stage + 2))
        for changed in {placement[stage] for stage in neighbours}:
            next_of[changed] = state.best(changed)
    return state.orders


@dataclass
class _State:
    """What has been put in order so far, and when it ends; arguments as of :func:`greedy_order`."""

    placement: Sequence[int]
    num_micro_batches: int
    costs: Costs
    bound: Sequence[int]
    begun: Sequence[Sequence[Action]]
    priority: Sequence[Kind]

    def __post_init__(self) -> None:
        ranks, stages = range(len(self.bound)), range(len(self.placement))
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self._begun = [deque(own) for own in self.begun]
        self._stages = [[stage for stage in stages if self.placement[stage] == rank] for rank in ranks]
        self._clock = [0.0 for _ in ranks]
        self._held = [0 for _ in ranks]
        self._done: Counter[tuple[Kind, int]] = Counter()
        self._ends: dict[Action, float] = {}
        # Backward passes are split in every greedy order: gradients come from those for the inputs.
        self._gradients = {
            Action(Kind.BACKWARD_INPUT, stage, index) for stage in stages for index in range(self.num_micro_batches)
        }

    def best(self, rank: int) -> _Candidate | None:
        """What the rank starts next, if it can start anything."""
        if self._begun[rank]:
            return self._candidate(rank, self._begun[rank][0])
        return min(filter(None, (self._candidate(rank, action) for action in self._open(rank))), default=None)

    def run(self, rank: int, candidate: _Candidate) -> None:
        """Appends it to the rank's order."""
        action = candidate.action
        if self._begun[rank]:
            self._begun[rank].popleft()
        self.orders[rank].append(action)
        self._ends[action] = self._clock[rank] = candidate.start + self.costs.of(action)
        self._done[action.kind, action.stage] += 1
        # An activation is held from its forward pass to the end of its backward pass for the weights.
        self._held[rank] += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD_WEIGHT)

    def _open(self, rank: int) -> Iterator[Action]:
        """The next micro-batch of each stage for each kind, without forward passes beyond the bound."""
        last = self._stages[rank][-1]
        for stage in self._stages[rank]:
            for kind in self.priority:
                done = self._done[kind, stage]
                room = self.bound[rank] - self._held[rank] - (stage != last)
                if done < self.num_micro_batches and (kind is not Kind.FORWARD or room > 0):
                    yield Action(kind, stage, done)

    def _candidate(self, rank: int, action: Action) -> _Candidate | None:
        start = self._clock[rank]
        for needed in inputs_of(action, self._gradients):
            if needed not in self._ends:
                return None
            delay = self.costs.communication if self.placement[needed.stage] != rank else 0.0
            start = max(start, self._ends[needed] + delay)
        return _Candidate(start, self.priority.index(action.kind), len(self.placement) - action.stage, action)
