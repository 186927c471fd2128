"""Dependencies of actions: the graph that is checked for cycles and gives the times, and what can begin a pass."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from rl_backend.contracts import ScheduleError
from rl_backend.pipeline.schedule import COMPUTATIONS, RECEIVES, Action, Kind

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
MOST_NAMED = 8
"""Actions of a cycle that an error names."""


class Arrival(NamedTuple):
    """The end of a transfer, named by its receive."""

    receive: Action

    def __str__(self) -> str:
        return f"the transfer {self.receive.other_end} -> {self.receive}"


type Event = Action | Arrival
"""The end of a computation, the posting of a send or a receive, or the end of a transfer."""

type Graph = dict[Event, list[Event]]
"""What each event waits for."""


def inputs_of(action: Action, present: Container[Action]) -> list[Action]:
    """The computations whose results a computation needs.

    Args:
        present: all computations of the schedule: what gives the gradient is the full backward pass of the next stage, or
            the one for its inputs.
    """
    _, stage, micro_batch = action
    if action.kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, micro_batch)] if stage else []
    if action.kind is Kind.BACKWARD_WEIGHT:
        return [Action(Kind.BACKWARD_INPUT, stage, micro_batch)]
    after = (Action(kind, stage + 1, micro_batch) for kind in BACKWARDS)
    return [Action(Kind.FORWARD, stage, micro_batch), *(action for action in after if action in present)]


def event_graph(actions: Sequence[Sequence[Action]], placement: Sequence[int], *, one_queue_per_rank: bool = False) -> Graph:
    """What each event of a schedule waits for.

    A rank posts and computes in the order of its list. A transfer needs both its ends posted; a computation needs the
    transfers of its inputs. In one direction between two ranks, transfers end in the order in which they are posted. Where
    there are no sends and receives, a transfer needs only what it brings.

    Args:
        one_queue_per_rank: a transfer also waits for the end of every transfer posted before it on either of its ranks. An
            NCCL communicator works like that, gloo does not.
    """
    rank_of = {action: rank for rank, own in enumerate(actions) for action in own}
    graph: Graph = {}
    for own in actions:
        for before, action in zip((None, *own), own, strict=False):
            graph[action] = [before] if before is not None else []
    queues: dict[tuple[int, int], list[Arrival]] = defaultdict(list)
    for action, rank in rank_of.items():
        if action.kind in RECEIVES:
            graph[Arrival(action)] = [action, action.other_end]
            queues[rank_of[action.other_end], rank].append(Arrival(action))
        elif action.kind in COMPUTATIONS:
            for one in inputs_of(action, rank_of):
                arrival = arrival_of(one, action, placement)
                graph[action].append(arrival or one)
                if arrival is not None:
                    graph.setdefault(arrival, [one])
            if action.send in graph:
                graph[action.send].append(action)
    for queue in queues.values():
        for first, second in pairwise(queue):
            graph[second].append(first)
    if one_queue_per_rank:
        for own in actions:
            posted = [Arrival(one if one.kind in RECEIVES else one.other_end) for one in own if one.kind not in COMPUTATIONS]
            for first, second in pairwise(posted):
                graph[second].append(first)
    return graph


def in_order(graph: Mapping[Event, Iterable[Event]], describe: Callable[[Event], str] = str) -> list[Event]:
    """The events, each after those it waits for; raises :class:`ScheduleError` when some wait for each other."""
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        cycle = [describe(event) for event in reversed(error.args[1])]
        named = cycle if len(cycle) <= MOST_NAMED else [*cycle[: MOST_NAMED - 2], "...", cycle[-1]]
        raise ScheduleError(f"ranks wait for each other for ever: {' waits for '.join(named)}") from None


def arrival_of(source: Action, action: Action, placement: Sequence[int]) -> Arrival | None:
    """The transfer that brings the result of ``source`` to ``action``; None where both are on one rank."""
    if source.send is None or placement[source.stage] == placement[action.stage]:
        return None
    return Arrival(source.send.other_end)
