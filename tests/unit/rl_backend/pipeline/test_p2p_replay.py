"""The replay of transfers knows an order that waits for ever from one that ends."""

from __future__ import annotations

import pytest

from tests.support.p2p_replay import End, Event, Synchronise, Transfers, Wait, stuck


def alone(number: int, peer: int, *, sends: bool, numel: int = 4) -> Transfers:
    return Transfers(number, "pipeline", (End(sends, peer, numel),), batched=False)


def batch(number: int, *ends: End) -> Transfers:
    return Transfers(number, "pipeline", ends, batched=True)


def both_first(*, sends: bool) -> list[list[Event]]:
    """Two ranks that both send, or both receive, before they do the other."""
    return [[alone(0, 1 - rank, sends=sends), alone(1, 1 - rank, sends=not sends)] for rank in range(2)]


def ring(size: int) -> list[list[Event]]:
    """Each receives of the one before, then sends to the one after."""
    return [[alone(0, (rank - 1) % size, sends=False), alone(1, (rank + 1) % size, sends=True)] for rank in range(size)]


@pytest.mark.parametrize("eager", [False, True])
def test_two_that_begin_alike_wait_for_each_other_and_a_batch_does_not(eager: bool) -> None:
    for sends in (False, True):
        assert stuck(both_first(sends=sends), eager=eager) == [0, 1]
    assert not stuck([[batch(0, End(True, 1 - rank, 4), End(False, 1 - rank, 4))] for rank in range(2)], eager=eager)
    assert not stuck(
        [[alone(0, 1, sends=True), alone(1, 1, sends=False)], [alone(0, 0, sends=False), alone(1, 0, sends=True)]],
        eager=eager,
    )


def test_a_ring_waits_for_ever_where_its_group_has_one_communicator_alone() -> None:
    assert not stuck(ring(3), eager=False)
    assert stuck(ring(3), eager=True) == [0, 1, 2]


@pytest.mark.parametrize("synchronises", [False, True])
def test_a_host_that_waits_for_its_device_posts_nothing_more(synchronises: bool) -> None:
    """Over a group for each direction: what one sends needs what the other posts after its host has waited."""
    pause: list[Event] = [Synchronise()] if synchronises else []
    down, up = (Transfers(number, group, (), batched=False) for number, group in ((0, "down"), (1, "up")))
    first: list[Event] = [down._replace(ends=(End(False, 1, 4),)), Wait(0), up._replace(ends=(End(True, 1, 4),))]
    second: list[Event] = [
        up._replace(ends=(End(False, 0, 4),), number=0),
        *pause,
        down._replace(ends=(End(True, 0, 4),), number=1),
    ]
    assert stuck([first, second], eager=False) == ([0, 1] if synchronises else [])
