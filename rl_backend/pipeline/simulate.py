"""Simulated times of a schedule: costs of actions, the choice of an order by them, the timeline and its bubble."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from rl_backend.contracts import ConfigError
from rl_backend.pipeline.schedule import (
    COMPUTATIONS,
    Action,
    Arrival,
    Event,
    Graph,
    Kind,
    Order,
    Schedule,
    event_graph,
    in_order,
)


@dataclass(frozen=True)
class Costs:
    """Times in any one unit; the defaults are those for which the zero-bubble schedules were made.

    Attributes:
        forward, backward_input, backward_weight: of one micro-batch in one stage: one number for all stages, or one for
            each. A full backward pass takes the sum of the last two.
        communication: from the end of a computation until its result is on another rank.

    Raises:
        ConfigError: a time that is not finite, is negative, or is 0 where something is computed.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        expected = {name: "must be 0 or more" if name == "communication" else "must be above 0" for name in vars(self)}
        ConfigError.refuse_all(
            (f"Costs.{name}", time, expected[name])
            for name, value in vars(self).items()
            for time in (value if isinstance(value, Sequence) else (value,))
            if not math.isfinite(time) or time < 0 or (time == 0 and name != "communication")
        )

    def of(self, action: Action) -> float:
        """Time of a computation."""
        parts = {
            Kind.FORWARD: (self.forward,),
            Kind.BACKWARD_INPUT: (self.backward_input,),
            Kind.BACKWARD_WEIGHT: (self.backward_weight,),
            Kind.BACKWARD: (self.backward_input, self.backward_weight),
        }[action.kind]
        return sum(cost[action.stage] if isinstance(cost, Sequence) else cost for cost in parts)

    def require_stages(self, num_stages: int) -> None:
        """Raises :class:`ConfigError` unless times given for each stage are as many as there are stages."""
        ConfigError.refuse_all(
            (f"Costs.{name}", times, f"has {len(times)} times for {num_stages} stages")
            for name, times in vars(self).items()
            if isinstance(times, Sequence) and len(times) != num_stages
        )


def end_times(graph: Graph, costs: Costs) -> Mapping[Event, float]:
    """When each event ends if each starts as soon as those it waits for have ended; see :func:`in_order` for its error."""
    ends: dict[Event, float] = {}
    for event in in_order(graph):
        ends[event] = max((ends[before] for before in graph[event]), default=0.0) + _duration(event, costs)
    return ends


def _duration(event: Event, costs: Costs) -> float:
    if isinstance(event, Arrival):
        return costs.communication
    return costs.of(event) if event.kind in COMPUTATIONS else 0.0


def shortest(orders: Iterable[Order], placement: Sequence[int], costs: Costs) -> Order:
    """The first of the orders with the shortest makespan, and of those with the least idle time inside a rank."""
    found: list[tuple[tuple[float, float], Order]] = []
    for order in orders:
        ends = end_times(event_graph(order, placement), costs)
        makespan = max(ends[own[-1]] for own in order)
        idle = max(ends[own[-1]] - ends[own[0]] + costs.of(own[0]) - sum(map(costs.of, own)) for own in order)
        # Rounded, so that the order of additions does not decide.
        found.append(((round(makespan, 9), round(idle, 9)), order))
        # Nothing is better than an order without idle time, and the ones after it are dear to make.
        if idle < 1e-9 * makespan:
            break
    return min(found, key=itemgetter(0))[1]


class Span(NamedTuple):
    """A computation and when it ran, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank computed what. ``peak_activations`` are in stages times micro-batches."""

    spans: tuple[tuple[Span, ...], ...]
    peak_activations: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        return max(own[-1].end for own in self.spans) - min(own[0].start for own in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        return tuple(sum(span.end - span.start for span in own) for own in self.spans)

    @property
    def bubble_makespan(self) -> float:
        """Share of all ranks' time, from the first start to the last end anywhere, in which they idle."""
        # The cost of a step that waits for all ranks, as for the norm of all gradients.
        return max(0.0, 1.0 - sum(self.busy) / (self.makespan * len(self.spans)))

    @property
    def bubble_span(self) -> float:
        """Largest share over the ranks in which one idles between its own first start and last end."""
        # The cost of a step when a rank that is done continues with the next one.
        return max(
            max(0.0, 1.0 - busy / (own[-1].end - own[0].start)) for busy, own in zip(self.busy, self.spans, strict=True)
        )


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs a schedule on paper.

    A computation starts when its rank is free and what it needs has arrived. A transfer starts when both ends are posted
    and the one before it in the same direction between the two ranks has ended; it takes no rank's time.
    """
    costs = costs or Costs()
    costs.require_stages(schedule.num_stages)
    ends = end_times(event_graph(schedule.actions, schedule.placement), costs)
    return Timeline(
        spans=tuple(
            tuple(
                Span(action, ends[action] - costs.of(action), ends[action]) for action in own if action.kind in COMPUTATIONS
            )
            for own in schedule.actions
        ),
        peak_activations=schedule.peak_activations,
    )
