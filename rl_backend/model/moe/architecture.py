"""What a decoder with mixtures of experts has beyond a dense one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field

from rl_backend.contracts import ModelOptions
from rl_backend.model.dense import DenseArchitecture
from rl_backend.primitive.router import RouterSettings


class MoEOptions(ModelOptions):
    """Losses of the routers, off by default. Coefficients in ``config.json`` are not read.

    Each is added for every mixture of experts and averaged over the micro-batches of a ``forward_backward`` and the
    data-parallel ranks. They act on the gradients; the loss that is reported is the caller's alone.

    Attributes:
        router_aux_loss_coef: of :func:`rl_backend.primitive.router.load_balancing_loss`.
        router_z_loss_coef: of :func:`rl_backend.primitive.router.router_z_loss`.
    """

    router_aux_loss_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    router_z_loss_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class MoEArchitecture(DenseArchitecture):
    """A dense decoder in some of whose layers a mixture of experts is the feed-forward block.

    Attributes:
        router: of every mixture.
        expert_intermediate_size: of one expert; ``intermediate_size`` is that of the dense layers.
        sparse: for each layer, whether it has a mixture.
    """

    router: RouterSettings
    expert_intermediate_size: int
    sparse: tuple[bool, ...]

    @classmethod
    def of(
        cls, dense: DenseArchitecture, *, router: RouterSettings, expert_intermediate_size: int, sparse: tuple[bool, ...]
    ) -> Self:
        """``dense`` with mixtures."""
        return cls(**vars(dense), router=router, expert_intermediate_size=expert_intermediate_size, sparse=sparse)
