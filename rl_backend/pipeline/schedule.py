"""A pipeline schedule: actions of each rank, layers and ranks of its stages, what each action waits for, and the proof."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from rl_backend.contracts import ConfigError, ScheduleError
from rl_backend.contracts.errors import listed


class Kind(StrEnum):
    """The kind of an action; its value is the name in print.

    The backward pass of a stage is one ``BACKWARD``, or a ``BACKWARD_INPUT``, which the stage before waits for, and a
    ``BACKWARD_WEIGHT`` at any time after it. Sends and receives are posted: only the computation that needs what is received
    waits.
    """

    FORWARD = "F"
    BACKWARD = "BW"
    BACKWARD_INPUT = "B"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"


COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT})
# What a computation adds to the activations of its rank: the backward pass for the weights is the last to need them.
_HELD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
_OTHER_END = {
    Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1),
    Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1),
    Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1),
}
_SEND = {
    Kind.FORWARD: Kind.SEND_ACTIVATION,
    Kind.BACKWARD: Kind.SEND_GRADIENT,
    Kind.BACKWARD_INPUT: Kind.SEND_GRADIENT,
}


class Action(NamedTuple):
    """One entry of a rank's list. ``stage`` is the one that acts: a send's sender, a receive's receiver."""

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def other_end(self) -> Action:
        """The receive of this send, or the send of this receive."""
        kind, step = _OTHER_END[self.kind]
        return Action(kind, self.stage + step, self.micro_batch)

    @property
    def send(self) -> Action | None:
        """The send of what this computation gives to another stage; None for any other action."""
        return self._replace(kind=_SEND[self.kind]) if self.kind in _SEND else None

    def __str__(self) -> str:
        """Stage, kind, micro-batch: ``3F0`` is the forward pass of stage 3 on the first micro-batch."""
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


def loop_placement(pp_size: int, stages_per_rank: int) -> tuple[int, ...]:
    """Rank of each stage when rank r has the stages ``r + i * pp_size``."""
    return tuple(stage % pp_size for stage in range(pp_size * stages_per_rank))


def v_placement(pp_size: int) -> tuple[int, ...]:
    """Rank of each stage when rank r has the stages r and ``2 * pp_size - 1 - r``: rank 0 has the first and the last."""
    return (*range(pp_size), *reversed(range(pp_size)))


def split_layers(num_layers: int, num_stages: int, sizes: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage: ``sizes`` of them, or evenly many. Raises :class:`ConfigError`: fewer layers than stages, or
    ``sizes`` that are not of these layers and stages.
    """
    if sizes is None:
        if num_layers < num_stages:
            raise ConfigError.of(
                "ParallelConfig.pp",
                num_stages,
                f"pp * vpp stages need as many layers, the model has {num_layers}; use at most {num_layers} stages",
            )
        each, more = divmod(num_layers, num_stages)
        # Stages in the middle get one more: the first also has the embeddings, and the last the head.
        favoured = [*range(1, num_stages - 1), 0, num_stages - 1][:more]
        sizes = [each + (stage in favoured) for stage in range(num_stages)]
    elif len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError.of(
            "NativeConfig.pipeline_layers",
            tuple(sizes),
            f"expected {num_stages} numbers, one for each of pp * vpp stages, each at least 1, that add up to the model's "
            f"{num_layers} layers; these are {len(sizes)} that add up to {sum(sizes)}",
        )
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


Order = Sequence[Sequence[Action]]
"""The computations of each rank, in order, without sends and receives."""


@dataclass(frozen=True)
class Schedule:
    """One training step, or with ``forward_only`` one evaluation, of a model in stages.

    Attributes:
        placement: rank of each stage.
        actions: for each rank what it does, in order.
        activation_bound: for each rank the most activations, in stages times micro-batches, that it may hold; one is held
            from its forward pass to the end of its backward pass for the weights.
    """

    name: str
    num_micro_batches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    activation_bound: tuple[int, ...]
    forward_only: bool = False

    @property
    def pp_size(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.pp_size

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the most activations that it holds at once, in stages times micro-batches."""
        if self.forward_only:
            return (0,) * self.pp_size
        return tuple(max(accumulate((_HELD.get(action.kind, 0) for action in own), initial=0)) for own in self.actions)

    def __str__(self) -> str:
        """The computations of each rank on a line."""
        return "\n".join(
            f"{rank}: {' '.join(str(action) for action in actions if action.kind in COMPUTATIONS)}"
            for rank, actions in enumerate(self.actions)
        )


BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
MOST_NAMED = 8  # actions of a cycle, or problems, that an error names


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
    """The computations whose results a computation needs, of those ``present`` in the schedule."""
    _, stage, micro_batch = action
    if action.kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, micro_batch)] if stage else []
    if action.kind is Kind.BACKWARD_WEIGHT:
        return [Action(Kind.BACKWARD_INPUT, stage, micro_batch)]
    # The gradient comes from the full backward pass of the next stage, or from the one for its inputs.
    after = (Action(kind, stage + 1, micro_batch) for kind in BACKWARDS)
    return [Action(Kind.FORWARD, stage, micro_batch), *(action for action in after if action in present)]


def event_graph(actions: Sequence[Sequence[Action]], placement: Sequence[int], *, one_queue_per_rank: bool = False) -> Graph:
    """What each event of a schedule waits for.

    A rank posts and computes in the order of its list. A transfer needs both its ends posted (without sends and receives
    only what it brings), a computation the transfers of its inputs. ``one_queue_per_rank``: a transfer also waits for the
    end of every transfer posted before it on either of its ranks. An NCCL communicator works like that, gloo does not.
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
    # In one direction between two ranks, transfers end in the order in which they are posted.
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


def validate(schedule: Schedule) -> None:
    """Checks a schedule completely; what passes can be run. Raises :class:`ScheduleError` with the rank and the action.

    - Each stage is on one rank, and each rank acts for its own stages.
    - Each stage does each micro-batch once: one forward pass, one full backward pass or one for the inputs and one for the
      weights, and a send and a receive for each result that another rank needs; nothing else.
    - In each direction between two ranks, receives are posted in the order of the sends.
    - No rank waits forever, even if its transfers are worked off one after the other.
    - No rank holds more activations than ``activation_bound``.
    """
    # One after the other: each takes for granted what the ones before it have checked.
    for check in (_misplaced, _incomplete, _unpaired, _waiting_or_full):
        if problems := list(check(schedule)):
            raise ScheduleError(f"schedule {schedule.name}: {'; '.join(problems[:MOST_NAMED])}", schedule=schedule.name)


def _misplaced(schedule: Schedule) -> Iterator[str]:
    placed, ranks = sorted(set(schedule.placement)), list(range(schedule.pp_size))
    if placed != ranks:
        yield f"stages are placed on the ranks {placed}, and there are lists for {ranks}"
    if len(schedule.activation_bound) != schedule.pp_size:
        yield f"{len(schedule.activation_bound)} activation bounds for {schedule.pp_size} ranks"
    for rank, own in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        for action in own:
            if action.stage not in stages:
                yield f"rank {rank} has {action}, and only the stages {listed(stages)}"
            if not 0 <= action.micro_batch < schedule.num_micro_batches:
                yield f"rank {rank} has {action}, and there are {schedule.num_micro_batches} micro-batches"


def _incomplete(schedule: Schedule) -> Iterator[str]:
    counts = Counter(action for own in schedule.actions for action in own)
    if repeated := [action for action, count in counts.items() if count > 1]:
        yield f"more than once: {listed(repeated)}"
    computations = {
        Action(kind, stage, micro_batch)
        for stage in range(schedule.num_stages)
        for micro_batch in range(schedule.num_micro_batches)
        for kind in _passes(schedule, split=Action(Kind.BACKWARD, stage, micro_batch) not in counts)
    }
    arrivals = (
        arrival_of(one, action, schedule.placement) for action in computations for one in inputs_of(action, computations)
    )
    receives = {arrival.receive for arrival in arrivals if arrival is not None}
    expected = computations | receives | {receive.other_end for receive in receives}
    for problem, actions in (("missing", expected - set(counts)), ("not needed", set(counts) - expected)):
        if actions:
            ordered = sorted(actions, key=lambda action: (action.micro_batch, action.stage, action.kind.value))
            yield f"{problem}: {listed(ordered)}"


def _passes(schedule: Schedule, *, split: bool) -> tuple[Kind, ...]:
    if schedule.forward_only:
        return (Kind.FORWARD,)
    return (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.FORWARD, Kind.BACKWARD)


def _unpaired(schedule: Schedule) -> Iterator[str]:
    rank_of = schedule.placement
    for source, target in product(range(schedule.pp_size), repeat=2):
        sends = [one for one in schedule.actions[source] if one.kind in SENDS and rank_of[one.other_end.stage] == target]
        receives = [
            one for one in schedule.actions[target] if one.kind in RECEIVES and rank_of[one.other_end.stage] == source
        ]
        for place, (send, receive) in enumerate(zip(sends, receives, strict=True)):
            if send.other_end != receive:
                yield f"transfer {place} from rank {source} to rank {target} is sent as {send} and received as {receive}"


def _waiting_or_full(schedule: Schedule) -> Iterator[str]:
    def describe(event: Event) -> str:
        return str(event) if isinstance(event, Arrival) else f"{event} of rank {schedule.placement[event.stage]}"

    in_order(event_graph(schedule.actions, schedule.placement, one_queue_per_rank=True), describe)
    for rank, (peak, bound) in enumerate(zip(schedule.peak_activations, schedule.activation_bound, strict=True)):
        if peak > bound:
            yield f"rank {rank} holds {peak} activations, more than its bound of {bound}"
