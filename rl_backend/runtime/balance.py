"""Loss-free balancing (Wang et al., arXiv 2408.15664): routers' biases, which move with how often experts were chosen.

Counted are the choices of the passes that gradients come from, of all ranks and micro-batches since the last step: not those
of forward-only passes, of recomputation, and for padding. Where routes are replayed, these are what is counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.parallel.collectives import sum_over
from rl_backend.parallel.shards import local_region, local_tensor
from rl_backend.primitive.router import expert_bias_step, expert_use


class ExpertBalance:
    """The routers with a bias on one rank, and how often each of their experts was chosen since the last step.

    Args:
        routers: number of a stage -> its routers.
        bias_of: the bias of a router, (E,).
        rate: what a bias moves by in a step.
        groups: ranks that have other tokens of the same routers.
    """

    def __init__(
        self,
        routers: Mapping[int, Sequence[Any]],
        bias_of: Callable[[Any], Tensor],
        rate: float,
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        self.routers = routers
        self._bias_of = bias_of
        self._rate = rate
        self._groups = groups
        self._counts: dict[Any, Tensor] = {}

    def add(self, counts: Mapping[Any, Tensor]) -> None:
        """Adds (E,) choices of this rank's tokens."""
        for router, count in counts.items():
            self._counts[router] = self._counts[router] + count if router in self._counts else count

    def drop(self) -> None:
        self._counts.clear()

    @torch.no_grad()
    def step(self, *, taken: bool) -> None:
        """Moves every bias, if the optimizer has taken the step, and counts anew. A collective over the ranks of a stage."""
        biases = {router: self._bias_of(router) for stage in self.routers.values() for router in stage}
        if taken and biases:
            # One collective for all routers of this rank.
            sizes = [len(bias) for bias in biases.values()]
            counts = torch.cat([self._count(router, bias) for router, bias in biases.items()])
            for group in self._groups:
                sum_over(group)(counts)
            for bias, count in zip(biases.values(), counts.split(sizes), strict=True):
                (mine,) = local_region(bias)
                local_tensor(bias).add_(expert_bias_step(count, self._rate)[mine])
        # A step that is skipped uses its counts up too: the next one learns from other tokens.
        self.drop()

    def _count(self, router: Any, bias: Tensor) -> Tensor:
        found = self._counts.get(router)
        return torch.zeros(len(bias), dtype=torch.int64, device=bias.device) if found is None else found


# A pass that fails in the middle must not count.
class PassLoads:
    """What one ``forward_backward`` adds to an :class:`ExpertBalance` when it has run to its end; without one, nothing."""

    def __init__(self, balance: ExpertBalance | None) -> None:
        self._balance = balance
        self._counts: dict[Any, Tensor] = {}

    def routers(self, stage: int) -> Sequence[Any]:
        """Those of a stage whose choices are counted."""
        return () if self._balance is None else self._balance.routers.get(stage, ())

    def count(self, router: Any, experts: Tensor, num_experts: int, padding: Tensor | None) -> None:
        """Counts (T, top_k) choices of one forward pass; ``padding``, (T,) bool, says which rows stand for no token."""
        found = expert_use(experts, num_experts, padding).counts
        self._counts[router] = self._counts[router] + found if router in self._counts else found

    def commit(self) -> None:
        if self._balance is not None:
            self._balance.add(self._counts)
