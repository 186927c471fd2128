"""What a schedule is worth: its timeline, bubble and activations for given costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rl_backend.parallel.pipeline.actions import COMPUTATIONS, Action
from rl_backend.parallel.pipeline.costs import Costs
from rl_backend.parallel.pipeline.dependencies import Arrival, Event, event_graph, in_order
from rl_backend.parallel.pipeline.schedule import Schedule


class Span(NamedTuple):
    """A computation and when it ran, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank computed what.

    Attributes:
        spans: of each rank, in order.
        peak_activations: of each rank, in stages times micro-batches.
    """

    spans: tuple[tuple[Span, ...], ...]
    peak_activations: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        return max(own[-1].end for own in self.spans) - min(own[0].start for own in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time in which it computed."""
        return tuple(sum(span.end - span.start for span in own) for own in self.spans)

    @property
    def bubble_makespan(self) -> float:
        """Share of all ranks' time, from the first start to the last end anywhere, in which they idle.

        What a step costs that waits for all ranks, as for the norm of all gradients.
        """
        return max(0.0, 1.0 - sum(self.busy) / (self.makespan * len(self.spans)))

    @property
    def bubble_span(self) -> float:
        """Largest share over the ranks in which one idles between its own first start and last end.

        What a step costs when a rank that is done goes on with the next one.
        """
        return max(
            max(0.0, 1.0 - busy / (own[-1].end - own[0].start)) for busy, own in zip(self.busy, self.spans, strict=True)
        )


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs a schedule on paper.

    A computation starts when its rank is free and what it needs has arrived. A transfer starts when both ends are posted and
    the one before it in the same direction between the two ranks has ended; it takes ``costs.communication`` and no rank's
    time.

    Args:
        costs: 1 for each computation and nothing for communication by default.

    Raises:
        ConfigError: costs for another number of stages.
        ScheduleError: ranks wait for each other.
    """
    costs = costs or Costs()
    costs.require_stages(schedule.num_stages)
    graph = event_graph(schedule.actions, schedule.placement, one_queue_per_rank=False)
    ends: dict[Event, float] = {}
    for event in in_order(graph):
        start = max((ends[before] for before in graph[event]), default=0.0)
        ends[event] = start + _duration(event, costs)
    return Timeline(
        spans=tuple(
            tuple(
                Span(action, ends[action] - costs.of(action), ends[action]) for action in own if action.kind in COMPUTATIONS
            )
            for own in schedule.actions
        ),
        peak_activations=schedule.peak_activations,
    )


def _duration(event: Event, costs: Costs) -> float:
    if isinstance(event, Arrival):
        return costs.communication
    return costs.of(event) if event.kind in COMPUTATIONS else 0.0
