"""One outcome for all ranks, so that a failure on one leaves none waiting."""

from __future__ import annotations

import torch.distributed as dist

from rl_backend.contracts import CheckpointError


def raise_on_every_rank(problem: str | None, group: dist.ProcessGroup, cause: BaseException | None = None) -> None:
    """A collective over ``group`` (gloo): raises :class:`CheckpointError` on every rank if any rank has a problem.

    Args:
        cause: what the error on this rank is raised from.
    """
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    found = {rank: text for rank, text in enumerate(problems) if text is not None}
    if found:
        distinct = dict.fromkeys(found.values())
        where = "" if len(found) == len(problems) else f" (on rank {', '.join(map(str, found))})"
        raise CheckpointError("; ".join(distinct) + where, ranks=sorted(found)) from cause
