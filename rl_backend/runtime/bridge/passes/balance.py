"""Loss-free balancing (Wang et al., arXiv 2408.15664) of Megatron's routers, by the native runtime's rule.

Megatron moves the bias in ``forward_backward``, before it is known that a step is taken, and its count of loads fails on a
mask of padding. Counted here are the choices of the passes that gradients come from, of all ranks and micro-batches since
the last step: not those of forward-only passes, of recomputation, and for padding.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rl_backend.parallel.collectives import sum_over
from rl_backend.primitive.router import expert_bias_step, expert_use
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups
from rl_backend.runtime.bridge.passes.batch import LaidOut


class ExpertBalance:
    """The routers with a bias on one rank, and how often each of their experts was chosen since the last step.

    Args:
        models: this rank's chunks without their wrappers, once routes are connected.
        rate: what a bias moves by in a step.
    """

    def __init__(self, models: Sequence[nn.Module], rate: float, groups: BridgeGroups) -> None:
        self.groups = groups
        self.routers: list[list[Any]] = [
            [module for module in model.modules() if isinstance(module, TopKRouter) and module.expert_bias is not None]
            for model in models
        ]
        self._rate = rate
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
        routers = [router for chunk in self.routers for router in chunk]
        if taken and routers:
            zeros = [torch.zeros_like(router.expert_bias, dtype=torch.int64) for router in routers]
            counts = torch.cat([self._counts.get(router, zero) for router, zero in zip(routers, zeros, strict=True)])
            for group in (self.groups.dp_group, self.groups.pg.tp):
                sum_over(group)(counts)
            for router, count in zip(routers, counts.split([len(zero) for zero in zeros]), strict=True):
                router.expert_bias.add_(expert_bias_step(count, self._rate))
        self.drop()


class PassLoads:
    """What one ``forward_backward`` adds to an :class:`ExpertBalance`; without one, nothing."""

    def __init__(self, balance: ExpertBalance | None) -> None:
        self._balance = balance
        self._counts: dict[Any, Tensor] = {}

    @contextmanager
    def forward(self, chunk: int, laid_out: LaidOut) -> Generator[None]:
        """Around the forward pass of a chunk; a recomputation runs outside of it."""
        if self._balance is None:
            yield
            return
        rows, columns = laid_out.shape
        padding = torch.ones(rows * columns, dtype=torch.bool, device=laid_out.places.device)
        padding[laid_out.places] = False
        group, routers = self._balance.groups.pg.tp, self._balance.routers[chunk]
        for router in routers:
            router.router_replay.observe = partial(self._count, router, padding.chunk(group.size())[group.rank()])
        try:
            yield
        finally:
            for router in routers:
                router.router_replay.observe = None

    def commit(self) -> None:
        """The pass has run to its end, so it counts."""
        if self._balance is not None:
            self._balance.add(self._counts)

    def _count(self, router: Any, padding: Tensor, experts: Tensor) -> None:
        found = expert_use(experts, len(router.expert_bias), padding).counts
        self._counts[router] = self._counts[router] + found if router in self._counts else found
