"""Tensor parallelism over the heads of projections that one matrix holds one after the other."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.parallel.collectives import all_to_all_rows
from rl_backend.parallel.shards import chunk


class FusedProjections:
    """Outputs of one linear layer that are several projections end to end, each of which is cut by heads on its own.

    A rank keeps neighbouring rows of the matrix, as of every other: a rectangle, which is what checkpoints, exports and
    adapters know. These are not the rows of its heads, so that outputs change ranks before heads are computed: a rank
    sends no more than its outputs, less than the tokens' hidden states that were gathered for the layer, and gets as many.

    Args:
        sizes: features of each projection; the ranks divide them.
    """

    def __init__(self, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        self.group = group
        rank, ranks = group.rank(), range(group.size())
        wanted = [_features_of_heads(sizes, group.size(), each) for each in ranks]
        held = [chunk(slice(0, sum(sizes)), group.size(), each) for each in ranks]
        self._mine = wanted[rank]
        sent = [[number for part in parts for number in _common(part, held[rank])] for parts in wanted]
        self._sent = [len(numbers) for numbers in sent]
        self._received = [sum(len(_common(part, other)) for part in self._mine) for other in held]
        self._order = torch.tensor([number - held[rank].start for numbers in sent for number in numbers], device="cpu")

    def of_my_heads(self, outputs: Tensor) -> Tensor:
        """(N, this rank's outputs) -> (N, features of its heads), projection after projection. A collective, both ways."""
        self._order = self._order.to(outputs.device)
        features = outputs.t().index_select(0, self._order)
        # From the ranks in their order come ascending features: all of mine in their order.
        return all_to_all_rows(features, self._sent, self._received, self.group).t()

    def rows_of_my_heads(self, weight: Tensor) -> Tensor:
        """(features of all heads, ...) -> (features of this rank's heads, ...)."""
        return torch.cat([weight[part] for part in self._mine])


def _features_of_heads(sizes: Sequence[int], ranks: int, rank: int) -> list[slice]:
    """Where the features of a rank's heads are, in each projection."""
    parts, start = [], 0
    for size in sizes:
        parts.append(chunk(slice(start, start + size), ranks, rank))
        start += size
    return parts


def _common(first: slice, second: slice) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))
