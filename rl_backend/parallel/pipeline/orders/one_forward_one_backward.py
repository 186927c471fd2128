"""1F1B, and interleaved 1F1B with several stages per rank, with full backward passes (arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from rl_backend.parallel.pipeline.actions import Action, Kind


def one_forward_one_backward(pp_size: int, num_micro_batches: int) -> list[list[Action]]:
    """Rank r runs ``pp_size - r`` forward passes ahead, then one backward pass for each forward pass."""
    return [
        _alternate(
            [Action(Kind.FORWARD, rank, micro_batch) for micro_batch in range(num_micro_batches)],
            [Action(Kind.BACKWARD, rank, micro_batch) for micro_batch in range(num_micro_batches)],
            ahead=pp_size - rank,
        )
        for rank in range(pp_size)
    ]


def interleaved(pp_size: int, num_micro_batches: int, stages_per_rank: int) -> list[list[Action]]:
    """Groups of ``pp_size`` micro-batches go through each of a rank's stages in turn, rank r having ``r + i * pp_size``."""
    group = pp_size * stages_per_rank
    steps = range(num_micro_batches * stages_per_rank)
    forward = [(step % group // pp_size, step // group * pp_size + step % pp_size) for step in steps]
    return [
        _alternate(
            [Action(Kind.FORWARD, rank + chunk * pp_size, micro_batch) for chunk, micro_batch in forward],
            [
                Action(Kind.BACKWARD, rank + (stages_per_rank - 1 - chunk) * pp_size, micro_batch)
                for chunk, micro_batch in forward
            ],
            ahead=_ahead(pp_size, stages_per_rank, rank),
        )
        for rank in range(pp_size)
    ]


def bound_of_one_forward_one_backward(pp_size: int, num_micro_batches: int) -> list[int]:
    """Activations of each rank: those of the forward passes that it runs ahead."""
    return [min(num_micro_batches, pp_size - rank) for rank in range(pp_size)]


def bound_of_interleaved(pp_size: int, num_micro_batches: int, stages_per_rank: int) -> list[int]:
    """Activations of each rank: those of the forward passes that it runs ahead."""
    most = num_micro_batches * stages_per_rank
    return [min(most, _ahead(pp_size, stages_per_rank, rank)) for rank in range(pp_size)]


def _ahead(pp_size: int, stages_per_rank: int, rank: int) -> int:
    return 2 * (pp_size - rank - 1) + (stages_per_rank - 1) * pp_size + 1


def _alternate(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> list[Action]:
    """``ahead`` forward passes, then a backward and a forward pass in turn as long as there are any."""
    order = list(forward[:ahead])
    for step, action in enumerate(backward):
        order += [action, *forward[ahead + step : ahead + step + 1]]
    return order
