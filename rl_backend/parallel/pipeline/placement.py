"""Which rank has which stages of the model."""

from __future__ import annotations


def loop_placement(pp_size: int, stages_per_rank: int) -> tuple[int, ...]:
    """Rank of each stage when rank r has the stages ``r + i * pp_size``."""
    return tuple(stage % pp_size for stage in range(pp_size * stages_per_rank))


def v_placement(pp_size: int) -> tuple[int, ...]:
    """Rank of each stage when rank r has the stages r and ``2 * pp_size - 1 - r``: rank 0 has the first and the last."""
    return (*range(pp_size), *reversed(range(pp_size)))
