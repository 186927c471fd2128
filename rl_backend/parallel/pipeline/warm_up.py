"""The part of a training pass that can run before it is known whether it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rl_backend.parallel.pipeline.actions import COMPUTATIONS, Action, Kind


class WarmUp(NamedTuple):
    """The beginning of a schedule: forward passes before each rank's first loss and first backward pass.

    Attributes:
        lengths: for each rank how many of its actions.
        left_over: for each rank, in order, the other ends of sends and receives that peers have posted by then and this rank
            has not. With them every transfer is complete, so that the pass can end here on all ranks.
    """

    lengths: tuple[int, ...]
    left_over: tuple[tuple[Action, ...], ...]


def plan_warm_up(actions: Sequence[Sequence[Action]], num_stages: int) -> WarmUp:
    """Finds the longest beginning that waits for nothing after it.

    Args:
        actions: for each rank what it does, in order.
    """
    lengths = [_first_result(own, num_stages) for own in actions]
    while True:
        begun = _begun(actions, lengths)
        shorter = [
            next((i for i, action in enumerate(own[:length]) if not _is_fed(action, begun)), length)
            for own, length in zip(actions, lengths, strict=True)
        ]
        if shorter == lengths:
            break
        lengths = shorter
    posted = {action.other_end for action in begun if action.kind not in COMPUTATIONS}
    left_over = (
        tuple(action for action in own[length:] if action in posted) for own, length in zip(actions, lengths, strict=True)
    )
    return WarmUp(tuple(lengths), tuple(left_over))


def _first_result(own: Sequence[Action], num_stages: int) -> int:
    """Where the first loss, or the first backward pass, is computed."""
    last = num_stages - 1
    results = (
        i
        for i, action in enumerate(own)
        if action.kind in COMPUTATIONS and (action.kind is not Kind.FORWARD or action.stage == last)
    )
    return next(results, len(own))


def _begun(actions: Sequence[Sequence[Action]], lengths: Sequence[int]) -> set[Action]:
    return {action for own, length in zip(actions, lengths, strict=True) for action in own[:length]}


def _is_fed(action: Action, begun: set[Action]) -> bool:
    """Whether what a forward pass takes is made and sent in the beginning; other actions wait for nothing."""
    if action.kind is not Kind.FORWARD or action.stage == 0:
        return True
    receive = Action(Kind.RECEIVE_ACTIVATION, action.stage, action.micro_batch)
    before = Action(Kind.FORWARD, action.stage - 1, action.micro_batch)
    return before in begun and (receive not in begun or receive.other_end in begun)
