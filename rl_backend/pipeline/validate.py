"""Proof that a schedule can be run: complete, paired, without deadlock and within its activations."""

from collections import Counter

from rl_backend.contracts import ScheduleError
from rl_backend.contracts.errors import listed
from rl_backend.pipeline.schedule import (
    RECEIVES,
    SENDS,
    Action,
    Arrival,
    Event,
    Kind,
    Schedule,
    arrival_of,
    event_graph,
    in_order,
    inputs_of,
)


def validate(schedule: Schedule) -> None:
    """Checks a schedule completely; what passes can be run.

    - Each stage is on one rank, and each rank acts for its own stages.
    - Each stage does each micro-batch once: one forward pass, one full backward pass or one for the inputs and one for the
      weights, and a send and a receive for each result that another rank needs; nothing else.
    - In each direction between two ranks, receives are posted in the order of the sends.
    - No rank waits forever, even if its transfers are worked off one after the other: all actions can be brought into one
      order in which each comes after what it needs.
    - No rank holds more activations than ``activation_bound``.

    Raises:
        ScheduleError: what is wrong, with the rank and the action.
    """
    _check_placement(schedule)
    _check_complete(schedule)
    _check_pairs(schedule)
    graph = event_graph(schedule.actions, schedule.placement, one_queue_per_rank=True)
    in_order(graph, lambda event: _with_rank(schedule, event))
    for rank, (peak, bound) in enumerate(zip(schedule.peak_activations, schedule.activation_bound, strict=True)):
        if peak > bound:
            raise _error(schedule, f"rank {rank} holds {peak} activations, more than its bound of {bound}")


def _check_placement(schedule: Schedule) -> None:
    placed, ranks = sorted(set(schedule.placement)), list(range(schedule.pp_size))
    if placed != ranks:
        raise _error(schedule, f"stages are placed on the ranks {placed}, and there are lists for {ranks}")
    if len(schedule.activation_bound) != schedule.pp_size:
        raise _error(schedule, f"{len(schedule.activation_bound)} activation bounds for {schedule.pp_size} ranks")
    for rank, own in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        for action in own:
            if action.stage not in stages:
                raise _error(schedule, f"rank {rank} has {action}, and only the stages {listed(stages)}")
            if not 0 <= action.micro_batch < schedule.num_micro_batches:
                raise _error(schedule, f"rank {rank} has {action}, and there are {schedule.num_micro_batches} micro-batches")


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(action for own in schedule.actions for action in own)
    if repeated := [action for action, count in counts.items() if count > 1]:
        raise _error(schedule, f"more than once: {listed(repeated)}")
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
            ordered = sorted(actions, key=_place)
            raise _error(schedule, f"{problem}: {listed(ordered)}")


def _passes(schedule: Schedule, *, split: bool) -> tuple[Kind, ...]:
    if schedule.forward_only:
        return (Kind.FORWARD,)
    return (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.FORWARD, Kind.BACKWARD)


def _check_pairs(schedule: Schedule) -> None:
    rank_of = schedule.placement
    for source in range(schedule.pp_size):
        for target in range(schedule.pp_size):
            sends = [one for one in schedule.actions[source] if one.kind in SENDS and rank_of[one.other_end.stage] == target]
            receives = [
                one for one in schedule.actions[target] if one.kind in RECEIVES and rank_of[one.other_end.stage] == source
            ]
            for place, (send, receive) in enumerate(zip(sends, receives, strict=True)):
                if send.other_end != receive:
                    raise _error(
                        schedule,
                        f"transfer {place} from rank {source} to rank {target} is sent as {send} and received as {receive}",
                    )


def _with_rank(schedule: Schedule, event: Event) -> str:
    return str(event) if isinstance(event, Arrival) else f"{event} of rank {schedule.placement[event.stage]}"


def _place(action: Action) -> tuple[int, int, str]:
    return action.micro_batch, action.stage, action.kind.value


def _error(schedule: Schedule, what: str) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name}: {what}", schedule=schedule.name)
