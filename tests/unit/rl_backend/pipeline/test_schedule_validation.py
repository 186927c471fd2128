"""The validator of pipeline schedules passes what can be run, and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from rl_backend.contracts import ScheduleError
from rl_backend.pipeline import SCHEDULES, Action, Costs, Kind, Schedule, make_schedule, validate
from tests.support.pipeline import NotRunnableError, action, actions, run_with_tokens

SIZES = {1: (1, 3), 2: (1, 2, 4, 5), 3: (2, 3, 6, 7), 4: (1, 4, 8, 9)}


def schedules(**options: object) -> Iterator[Schedule]:
    for name, algorithm in SCHEDULES.items():
        for pp_size, counts in SIZES.items():
            for count in counts:
                fits = count >= algorithm.micro_batches_per_rank * pp_size
                fits = fits and not (algorithm.whole_groups and count % pp_size)
                if fits or "forward_only" in options:
                    yield make_schedule(name, pp_size, count, **options)  # type: ignore[arg-type]


@pytest.mark.shows("pipelines: every schedule is proved complete, paired, free of deadlock and within its activations")
@pytest.mark.parametrize(
    "options",
    [{}, {"forward_only": True}, {"costs": Costs(1.0, 1.7, 0.6, 0.3)}, {"costs": Costs(0.5, 0.4, 0.9, 2.0)}],
    ids=["equal costs", "forward only", "dear gradients", "dear communication"],
)
def test_every_schedule_runs_to_its_end_with_the_right_data_and_one_queue_on_each_rank(options: dict[str, object]) -> None:
    for schedule in schedules(**options):
        validate(schedule)
        run_with_tokens(schedule)


def test_the_bound_of_activations_is_reached_wherever_there_are_enough_micro_batches() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 4, 16)
        assert schedule.peak_activations == schedule.activation_bound, name


def mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """The schedule with one action dropped, doubled, exchanged with the one before it or put somewhere else."""
    choose = random.Random(0)

    def changed(rank: int, own_actions: list[Action]) -> Schedule:
        lists = [tuple(own_actions) if other == rank else own for other, own in enumerate(schedule.actions)]
        return replace(schedule, actions=tuple(lists))

    for rank, own in enumerate(schedule.actions):
        for place in range(len(own)):
            without = [*own[:place], *own[place + 1 :]]
            yield "dropped", changed(rank, without)
            target = choose.randrange(len(own))
            yield "doubled", changed(rank, [*own[:target], own[place], *own[target:]])
            yield "moved", changed(rank, [*without[:target], own[place], *without[target:]])
            if place:
                yield "swapped", changed(rank, [*own[: place - 1], own[place], own[place - 1], *own[place + 1 :]])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp_size", [2, 3])
def test_what_is_dropped_doubled_swapped_or_moved_is_refused_unless_it_still_runs(name: str, pp_size: int) -> None:
    schedule = make_schedule(name, pp_size, 2 * pp_size)
    refused: Counter[str] = Counter()
    for mutation, mutant in islice(mutants(schedule), 0, None, 1 if pp_size == 2 else 5):
        try:
            run_with_tokens(mutant)
        except NotRunnableError:
            with pytest.raises(ScheduleError):
                validate(mutant)
            refused[mutation] += 1
        else:
            assert mutation in ("swapped", "moved")
            validate(mutant)
    assert min(refused[mutation] for mutation in ("dropped", "doubled", "swapped", "moved")) >= 5


def edited(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    return replace(schedule, actions=tuple(tuple(actions) if rank == at else own for at, own in enumerate(schedule.actions)))


def test_an_error_names_the_schedule_the_rank_and_the_actions() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    first, last = ([*own] for own in schedule.actions)
    forward = Action(Kind.FORWARD, 1, 1)
    with pytest.raises(ScheduleError, match=r"schedule 1f1b: missing: 1F1$"):
        validate(edited(schedule, 1, [action for action in last if action != forward]))
    with pytest.raises(ScheduleError, match=r"schedule 1f1b: more than once: 1F1$"):
        validate(edited(schedule, 1, [*last, forward]))
    with pytest.raises(ScheduleError, match=r"rank 0 has 1F1, and only the stages 0$"):
        validate(edited(schedule, 0, [*first, forward]))
    with pytest.raises(ScheduleError, match=r"rank 1 has 1F2, and there are 2 micro-batches$"):
        validate(edited(schedule, 1, [*last, forward._replace(micro_batch=2)]))
    with pytest.raises(ScheduleError, match=r"not needed: 0W1$"):
        validate(edited(schedule, 0, [*first, Action(Kind.BACKWARD_WEIGHT, 0, 1)]))
    with pytest.raises(ScheduleError, match=r"rank 0 holds 2 activations, more than its bound of 1$"):
        validate(replace(schedule, activation_bound=(1, 1)))
    with pytest.raises(ScheduleError, match=r"placed on the ranks \[0\], and there are lists for \[0, 1\]"):
        validate(replace(schedule, placement=(0, 0)))


def test_receives_in_another_order_than_the_sends_are_named_with_both_ends() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    receives = [Action(Kind.RECEIVE_ACTIVATION, 1, micro_batch) for micro_batch in range(2)]
    rest = [action for action in schedule.actions[1] if action not in receives]
    with pytest.raises(
        ScheduleError, match=r"transfer 0 from rank 0 to rank 1 is sent as 0SEND_F0 and received as 1RECV_F1"
    ):
        validate(edited(schedule, 1, [*reversed(receives), *rest]))


def test_a_deadlock_is_told_as_who_waits_for_whom() -> None:
    schedule = make_schedule("1f1b", 2, 1)
    backward_first = [action for action in schedule.actions[0] if action.kind is not Kind.FORWARD]
    with pytest.raises(ScheduleError, match="wait for each other for ever: ") as failure:
        validate(edited(schedule, 0, [*backward_first, Action(Kind.FORWARD, 0, 0)]))
    assert "0SEND_F0 of rank 0 waits for 0F0 of rank 0" in str(failure.value)


def test_an_order_that_only_two_queues_could_carry_is_a_deadlock() -> None:
    schedule = make_schedule("zbv", 2, 2, forward_only=True)
    lists = {
        0: "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1",
        1: "1RECV_F0 1F0 2F0 1RECV_F1 2SEND_F0 1F1 2F1 2SEND_F1",
    }
    validate(replace(schedule, actions=parsed(lists)))
    # Now the second micro-batch is sent before the first is received on rank 0, and the other way round on rank 1.
    lists[1] = "1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1"
    with pytest.raises(ScheduleError, match="wait for each other for ever"):
        validate(replace(schedule, actions=parsed(lists)))


def parsed(lists: dict[int, str]) -> tuple[tuple[Action, ...], ...]:
    return tuple(actions(lists[rank]) for rank in sorted(lists))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": (0, 2)}, r"stages are placed on the ranks \[0, 2\], and there are lists for \[0, 1\]"),
        ({"placement": (1, 0)}, r"rank 0 has 0F0, and only the stages 1"),
        ({"activation_bound": (2, 1, 1)}, r"3 activation bounds for 2 ranks$"),
        ({"activation_bound": (2,)}, r"1 activation bounds for 2 ranks$"),
        ({"activation_bound": (2, 0)}, r"rank 1 holds 1 activations, more than its bound of 0$"),
        ({"activation_bound": (1, 1)}, r"rank 0 holds 2 activations, more than its bound of 1$"),
        ({"num_micro_batches": 1}, r"rank 0 has 0F1, and there are 1 micro-batches"),
        # Of each stage and micro-batch, in the order of the micro-batches.
        ({"num_micro_batches": 3}, r"missing: 0B2, 0F2, 0RECV_B2, 0SEND_F2 and 6 more$"),
        ({"forward_only": True}, r"not needed: 0BW0, 0RECV_B0, 1BW0, 1SEND_B0 and 4 more$"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_schedule_says_of_itself_must_be_true_of_its_lists(changes: dict[str, Any], message: str) -> None:
    schedule = make_schedule("1f1b", 2, 2)
    validate(replace(schedule, activation_bound=(2, 1)))
    with pytest.raises(ScheduleError, match=rf"^schedule 1f1b: {message}") as failure:
        validate(replace(schedule, **changes))
    assert failure.value.details["schedule"] == "1f1b"


def test_a_negative_micro_batch_is_none() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match=r"rank 1 has 1F-1, and there are 2 micro-batches$"):
        validate(edited(schedule, 1, [*schedule.actions[1], Action(Kind.FORWARD, 1, -1)]))


def test_transfers_are_counted_from_nought_for_each_direction_between_two_ranks() -> None:
    schedule = make_schedule("1f1b", 3, 2)
    own = list(schedule.actions[1])
    sends = [place for place, action in enumerate(own) if action.kind is Kind.SEND_GRADIENT]
    own[sends[0]], own[sends[1]] = own[sends[1]], own[sends[0]]
    with pytest.raises(
        ScheduleError, match=r"transfer 0 from rank 1 to rank 0 is sent as 1SEND_B1 and received as 0RECV_B0"
    ):
        validate(edited(schedule, 1, own))
    # Split and whole backward passes may be mixed within a schedule, one kind for each micro-batch of a stage.
    split = make_schedule("zb-h1", 1, 2)
    validate(edited(split, 0, [action("0F0"), action("0BW0"), action("0F1"), action("0B1"), action("0W1")]))
