"""Which engine has the beginning of a prompt in its cache."""

from __future__ import annotations

from actors.rollout.group.turns import PrefixRouter


def test_the_home_is_that_of_the_longest_beginning_and_the_oldest_are_forgotten() -> None:
    router = PrefixRouter(most=3)
    router.remember([1, 2], 0)
    router.remember([1, 2, 3, 4], 1)
    router.remember([5, 6], 2)
    assert router.find([1, 2, 3, 4, 5], (0, 1, 2)) == 1
    assert router.find([1, 2, 3, 4, 5], (0, 2)) == 0
    assert router.find([1, 2, 3], (0, 1, 2)) == 0
    assert router.find([1], (0, 1, 2)) is None
    router.remember([1, 2], 2)
    router.remember([7], 0)  # [1, 2, 3, 4] goes
    assert router.find([1, 2, 3, 4, 5], (0, 1, 2)) == 2
    assert router.find([5, 6, 7], (0, 1, 2)) == 2 and router.find([7, 7], (0,)) == 0


def test_lengths_that_no_sequence_has_any_more_are_not_looked_for() -> None:
    router = PrefixRouter(most=2)
    for length in (3, 5, 5, 7):
        router.remember(range(length), length)
    assert dict(router._lengths) == {5: 1, 7: 1} and len(router._engines) == 2
    assert (
        router.find(range(7), (5, 7)) == 7 and router.find(range(6), (5, 7)) == 5 and router.find(range(4), (3, 5)) is None
    )
    router.remember([1] * 7, 0)
    assert dict(router._lengths) == {7: 2}, "the one that was not asked for longest has gone"
