"""ZB-H1 and ZB-H2, the handcrafted zero-bubble schedules (arXiv 2401.10241, sections 2.1 and 2.2).

In both, all ranks hold equally many activations: those that wait for the backward pass for the inputs, fewer the later the
rank, and those whose backward pass for the weights is put off, more the later the rank.
"""

from __future__ import annotations

from rl_backend.parallel.pipeline.actions import Action, Kind


def zb_h1(pp_size: int, num_micro_batches: int) -> list[list[Action]]:
    """1F1B with the backward pass for the weights put off by r micro-batches on rank r.

    For p ranks, W at most F and B, and ``m >= p`` each rank idles for ``(p - 1) * (F + B - W)`` (table 2).
    """
    return [_order(rank, num_micro_batches, ahead=pp_size - rank, put_off=rank) for rank in range(pp_size)]


def zb_h2(pp_size: int, num_micro_batches: int) -> list[list[Action]]:
    """As many forward passes ahead as fit in until the first gradient is back.

    For p ranks and ``m >= 2p - 1`` a rank idles for ``max(0, (p - 1) * (F + B - 2W))`` between its first start and its
    last end (table 2).
    """
    return [_order(rank, num_micro_batches, ahead=2 * (pp_size - rank) - 1, put_off=2 * rank) for rank in range(pp_size)]


def bound_of_zb_h1(pp_size: int, num_micro_batches: int) -> list[int]:
    """Activations of each rank: p."""
    return [min(num_micro_batches, pp_size)] * pp_size


def bound_of_zb_h2(pp_size: int, num_micro_batches: int) -> list[int]:
    """Activations of each rank: 2p - 1."""
    return [min(num_micro_batches, 2 * pp_size - 1)] * pp_size


def _order(stage: int, num_micro_batches: int, *, ahead: int, put_off: int) -> list[Action]:
    order = [Action(Kind.FORWARD, stage, micro_batch) for micro_batch in range(min(ahead, num_micro_batches))]
    for micro_batch in range(num_micro_batches):
        order.append(Action(Kind.BACKWARD_INPUT, stage, micro_batch))
        if micro_batch >= put_off:
            order.append(Action(Kind.BACKWARD_WEIGHT, stage, micro_batch - put_off))
        if micro_batch + ahead < num_micro_batches:
            order.append(Action(Kind.FORWARD, stage, micro_batch + ahead))
    first_left = max(0, num_micro_batches - put_off)
    return order + [Action(Kind.BACKWARD_WEIGHT, stage, left) for left in range(first_left, num_micro_batches)]
