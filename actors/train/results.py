"""Results of all ranks as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.train.atoms import RankForward
from actors.train.context import HandleRef
from rl_backend.contracts import ForwardResult, merge_metrics
from rl_backend.data import MicroBatchPlan, restore_order


def merge_forward(
    handle: HandleRef, plan: MicroBatchPlan, seq_lens: Sequence[int], ranks: Sequence[RankForward]
) -> ForwardResult:
    """One ForwardResult from those of the source ranks.

    Loss i is the mean over data-parallel ranks of each rank's i-th micro-batch, because gradients are averaged over them:
    the sum of all is the number whose gradient the optimizer gets. Metrics add up over ranks; outputs are in the caller's
    order.
    """
    sources = [ranks[rank] for rank in handle.source_ranks]
    losses = [sum(values) / len(sources) for values in zip(*(source.losses for source in sources), strict=True)]
    outputs = {}
    for name in sources[0].outputs:
        per_rank = [
            torch.split(source.outputs[name], [seq_lens[index] for index in plan.rank_indices(dp_rank)])
            for dp_rank, source in enumerate(sources)
        ]
        outputs[name] = restore_order(plan, per_rank)
    return ForwardResult(tuple(losses), merge_metrics([source.metrics for source in sources]), outputs)
