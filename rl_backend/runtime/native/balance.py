"""Loss-free balancing (Wang et al., arXiv 2408.15664): routers' biases, which move with how often experts were chosen.

Counted are the choices of the passes that gradients come from, of all ranks and micro-batches since the last step: not those
of forward-only passes, of recomputation, and for padding. Where routes are replayed, these are what is counted.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_backend.parallel.collectives import sum_over
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.shards import local_region, local_tensor
from rl_backend.primitive.router import Router, Routing, expert_bias_step, expert_use


class BiasMove(NamedTuple):
    """Attributes:
    bias: this rank's part of a router's bias.
    step: what one optimizer step adds to it.
    """

    bias: Tensor
    step: Tensor


class ExpertBalance:
    """The routers with a bias on one rank, and how often each of their experts was chosen since the last step.

    Args:
        stages: number -> module, of this rank's stages; one of them where there is no pipeline.
        rate: what a bias moves by in a step.
    """

    def __init__(self, stages: Mapping[int, nn.Module], rate: float, groups: ParallelGroups) -> None:
        self.rate = rate
        self._groups = groups
        self.routers = {
            stage: [part for part in module.modules() if isinstance(part, Router) and part.expert_bias is not None]
            for stage, module in stages.items()
        }
        self._counts: dict[Router, Tensor] = {}

    def add(self, counts: Mapping[Router, Tensor]) -> None:
        """Adds (E,) choices of this rank's tokens."""
        for router, count in counts.items():
            self._counts[router] = self._counts[router] + count if router in self._counts else count

    def drop(self) -> None:
        self._counts.clear()

    def take(self) -> Sequence[BiasMove]:
        """How biases move in this step; choices are counted anew from here. A collective over the ranks of a stage."""
        routers = [router for stage in self.routers.values() for router in stage]
        if not routers:
            return ()
        device = self._groups.device
        zeros = [torch.zeros(router.settings.num_experts, dtype=torch.int64, device=device) for router in routers]
        counts = torch.cat([self._counts.get(router, zero) for router, zero in zip(routers, zeros, strict=True)])
        for group in (self._groups.fsdp_mesh.get_group(), self._groups.tp_group):
            sum_over(group)(counts)
        self.drop()
        moves = []
        for router, count in zip(routers, counts.split([len(zero) for zero in zeros]), strict=True):
            assert router.expert_bias is not None, "as it was when the router was found"
            bias = router.expert_bias.values
            (mine,) = local_region(bias)
            moves.append(BiasMove(local_tensor(bias), expert_bias_step(count, self.rate)[mine]))
        return moves


class PassLoads:
    """What one ``forward_backward`` adds to an :class:`ExpertBalance`; without one, nothing."""

    def __init__(self, balance: ExpertBalance | None) -> None:
        self._balance = balance
        self._counts: dict[Router, Tensor] = {}

    @contextmanager
    def forward(self, stage: int, padding: Tensor | None) -> Generator[None]:
        """Around the forward pass of one stage of the model, or of the model as stage 0.

        A recomputation in the backward pass runs outside of it, so it is not counted a second time.

        Args:
            padding: bool, which of this rank's rows stand for no token.
        """

        def count(router: nn.Module, _: Any, routing: Routing) -> None:
            assert isinstance(router, Router), "hooks are on routers"
            found = expert_use(routing.experts, router.settings.num_experts, padding).counts
            self._counts[router] = self._counts[router] + found if router in self._counts else found

        routers = () if self._balance is None else self._balance.routers.get(stage, ())
        hooks = [router.register_forward_hook(count) for router in routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def commit(self) -> None:
        """The pass has run to its end, so it counts."""
        if self._balance is not None:
            self._balance.add(self._counts)
