"""Schedules by name: their requirements, their construction, and the places of sends and receives."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.pipeline import orders
from rl_backend.pipeline.orders import greedy_order
from rl_backend.pipeline.schedule import Action, Kind, Order, Schedule, event_graph, loop_placement, v_placement, validate
from rl_backend.pipeline.simulate import Costs, end_times, shortest


def with_communication(order: Order, placement: Sequence[int], costs: Costs) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank: its computations, what it sends to other ranks and what it receives from them."""
    ends = end_times(event_graph(order, placement), costs)
    clocks = [[ends[action] for action in own] for own in order]
    gaps: list[list[list[Action]]] = [[[] for _ in range(len(own) + 1)] for own in order]
    for action in sorted(chain(*order), key=lambda action: (ends[action], action.stage)):
        send = action.send
        if send is None or not 0 <= send.other_end.stage < len(placement):
            continue
        if placement[send.other_end.stage] != placement[send.stage]:
            # A result is sent right after its computation, and its receive is posted before what the receiver is expected to
            # compute then: the transfer need not wait for the end of that. Both ends keep the order of these moments, so no
            # two ranks can wait for each other, whatever computations take in fact.
            for end in (send, send.other_end):
                rank = placement[end.stage]
                gaps[rank][bisect_right(clocks[rank], ends[action])].append(end)
    return tuple(
        tuple(action for index, gap in enumerate(of_rank) for action in (*gap, *own[index : index + 1]))
        for of_rank, own in zip(gaps, order, strict=True)
    )


@dataclass(frozen=True)
class Algorithm:
    """How a schedule is made of p ranks, m micro-batches, v stages per rank and costs.

    Attributes:
        placement: (p, v) -> rank of each stage.
        orders: (p, m, v, costs) -> the orders of computations to choose from.
        bound: (p, m, v) -> the most activations that each rank may hold.
        stages_per_rank: how many it needs; None for any number from 2 on.
        whole_groups: the number of micro-batches must be a multiple of the number of ranks.
        micro_batches_per_rank: the fewest micro-batches, divided by the number of ranks; one is always needed.
        splits_backward: into a pass for the inputs and one for the weights.
    """

    placement: Callable[[int, int], tuple[int, ...]]
    orders: Callable[[int, int, int, Costs], Iterable[Order]]
    bound: Callable[[int, int, int], Sequence[int]]
    stages_per_rank: int | None = 1
    whole_groups: bool = False
    micro_batches_per_rank: int = 0
    splits_backward: bool = True


SCHEDULES = {
    "1f1b": Algorithm(
        placement=loop_placement,
        orders=lambda p, m, v, costs: [orders.one_forward_one_backward(p, m)],
        bound=lambda p, m, v: [min(m, p - rank) for rank in range(p)],
        splits_backward=False,
    ),
    "interleaved-1f1b": Algorithm(
        placement=loop_placement,
        orders=lambda p, m, v, costs: [orders.interleaved(p, m, v)],
        bound=orders.bound_of_interleaved,
        stages_per_rank=None,
        whole_groups=True,
        splits_backward=False,
    ),
    "zb-h1": Algorithm(
        placement=loop_placement,
        orders=lambda p, m, v, costs: [orders.zb_h1(p, m)],
        bound=lambda p, m, v: [min(m, p)] * p,
    ),
    "zb-h2": Algorithm(
        placement=loop_placement,
        orders=lambda p, m, v, costs: [orders.zb_h2(p, m), orders.zb_h1(p, m)],
        bound=lambda p, m, v: [min(m, 2 * p - 1)] * p,
    ),
    "zbv": Algorithm(
        placement=lambda p, v: v_placement(p),
        orders=lambda p, m, v, costs: orders.orders_for_zbv(p, m, costs),
        bound=lambda p, m, v: orders.bound_of_zbv(p, m),
        stages_per_rank=2,
    ),
    "dualpipev": Algorithm(
        placement=lambda p, v: v_placement(p),
        orders=lambda p, m, v, costs: [orders.dualpipev(p, m)],
        bound=lambda p, m, v: [2 * p + 1] * p,
        stages_per_rank=2,
        micro_batches_per_rank=2,
    ),
}
"""Schedules that :func:`make_schedule` can make."""


def make_schedule(
    name: str,
    pp_size: int,
    num_micro_batches: int,
    *,
    stages_per_rank: int | None = None,
    forward_only: bool = False,
    costs: Costs | None = None,
) -> Schedule:
    """Makes and validates a schedule.

    Args:
        stages_per_rank: default: what the schedule needs, 2 where several will do.
        forward_only: only the forward passes, with the stages where the schedule has them; for any number of micro-batches.
        costs: what orders are chosen by (:func:`shortest`), and sends and receives placed for.

    Raises:
        ConfigError: an unknown name, a size that the schedule cannot do, or costs for another number of stages.
        BatchError: a number of micro-batches that the schedule cannot do.
    """
    algorithm = require_stages(name, pp_size, stages_per_rank)
    require_micro_batches(name, pp_size, num_micro_batches, forward_only=forward_only)
    v = stages_per_rank or algorithm.stages_per_rank or 2
    placement = algorithm.placement(pp_size, v)
    costs = costs or Costs()
    costs.require_stages(len(placement))
    if forward_only:
        unbounded = [len(placement) * num_micro_batches] * pp_size
        order: Order = greedy_order(placement, num_micro_batches, costs, unbounded, [()] * pp_size, [Kind.FORWARD])
    else:
        order = shortest(algorithm.orders(pp_size, num_micro_batches, v, costs), placement, costs)
    schedule = Schedule(
        name=name,
        num_micro_batches=num_micro_batches,
        placement=placement,
        actions=with_communication(order, placement, costs),
        activation_bound=(0,) * pp_size if forward_only else tuple(algorithm.bound(pp_size, num_micro_batches, v)),
        forward_only=forward_only,
    )
    validate(schedule)
    return schedule


def require_stages(name: str, pp_size: int, stages_per_rank: int | None = None) -> Algorithm:
    """The algorithm; raises :class:`ConfigError` unless it exists and can do this number of stages per rank (None: any)."""
    algorithm = SCHEDULES.get(name)
    if algorithm is None:
        raise ConfigError.of("schedule", name, f"unknown; known: {', '.join(SCHEDULES)}")
    if pp_size < 1:
        raise ConfigError.of("pp", pp_size, "must be at least 1")
    needed = algorithm.stages_per_rank
    if stages_per_rank is None or (stages_per_rank == needed if needed is not None else stages_per_rank >= 2):
        return algorithm
    match needed:
        case 2:
            problem = (
                f"{name} needs 2 stages per rank, 2 * {pp_size} = {2 * pp_size} in all: rank r has the stages r and "
                f"{2 * pp_size - 1} - r; set vpp=2"
            )
        case None:
            problem = f"{name} needs at least 2 stages per rank; set vpp=2 or schedule=1f1b"
        case _:
            several = ", ".join(other for other, one in SCHEDULES.items() if one.stages_per_rank != 1)
            problem = f"{name} has 1 stage per rank; set vpp=1, or a schedule of {several}"
    raise ConfigError.of("vpp", stages_per_rank, problem)


def require_micro_batches(name: str, pp_size: int, num_micro_batches: int, *, forward_only: bool = False) -> None:
    """Raises :class:`BatchError` unless the schedule, which exists, can do this number of micro-batches."""
    algorithm, problem = SCHEDULES[name], ""
    fewest = algorithm.micro_batches_per_rank * pp_size
    if num_micro_batches < 1:
        problem = "a step needs at least 1"
    elif forward_only:
        return
    elif algorithm.whole_groups and num_micro_batches % pp_size:
        below = num_micro_batches // pp_size * pp_size
        fitting = " or ".join(str(count) for count in (below, below + pp_size) if count)
        problem = (
            f"{name} with pp={pp_size} takes them in groups of pp, and {num_micro_batches} % {pp_size} = "
            f"{num_micro_batches % pp_size}; use {fitting}"
        )
    elif num_micro_batches < fewest:
        problem = (
            f"{name} with pp={pp_size} needs at least {algorithm.micro_batches_per_rank} * pp = {fewest}; "
            f"use {fewest} or more, or zbv, which does any number"
        )
    if problem:
        raise BatchError(f"{num_micro_batches} micro-batches: {problem}", num_micro_batches=num_micro_batches, pp=pp_size)
