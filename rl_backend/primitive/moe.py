"""A mixture of experts in the place of a feed-forward block."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.primitive.experts import SwiGLUExperts
from rl_backend.primitive.mlp import SwiGLU
from rl_backend.primitive.router import Router, RouterSettings, Routing
from rl_backend.primitive.router_balance import RouterLossCoefficients, with_router_losses


class MoE(nn.Module):
    """Each token goes through ``top_k`` of E experts and, where there are any, through the shared ones.

    Routing and applying are two steps, so that a choice of experts can be kept, or come from elsewhere.

    Args:
        intermediate_size: of one expert.
        shared_intermediate_size: of the experts that see every token, taken together (DeepSeekMoE, arXiv 2401.06066,
            section 3.2); 0 for none.
        shared_gate: multiply their output by ``sigmoid(x @ shared_expert_gate)``, as Qwen2-MoE does.
        coefficients: of the router's losses.

    Attributes:
        token_group: ranks over which the tokens of a micro-batch are spread, for the router's losses; None where this one
            has all of them.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        router: RouterSettings,
        *,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        coefficients: RouterLossCoefficients = RouterLossCoefficients(),  # noqa: B008 - immutable
    ) -> None:
        super().__init__()
        self.coefficients = coefficients
        self.token_group: dist.ProcessGroup | None = None
        self.gate = Router(hidden_size, router)
        self.experts = SwiGLUExperts(router.num_experts, hidden_size, intermediate_size)
        self.shared_expert = SwiGLU(hidden_size, shared_intermediate_size) if shared_intermediate_size else None
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False) if shared_gate else None

    def forward(
        self, x: Tensor, loss_weight: float = 1.0, padding: Tensor | None = None, experts: Tensor | None = None
    ) -> Tensor:
        """(T, hidden_size) -> (T, hidden_size).

        Args:
            loss_weight: what the router's losses of these tokens count for.
            padding: (T,) bool, tokens that do not count in the router's losses.
            experts: as in :meth:`~rl_backend.primitive.router.Router.forward`.
        """
        return self.apply_experts(x, self.route(x, loss_weight, experts, padding))

    def route(
        self, x: Tensor, loss_weight: float = 1.0, experts: Tensor | None = None, padding: Tensor | None = None
    ) -> Routing:
        """Chooses experts, or takes those of ``experts``, and weights them."""
        routing: Routing = self.gate(x, experts)
        return with_router_losses(routing, self.gate.settings, self.coefficients, loss_weight, padding, self.token_group)

    def apply_experts(self, x: Tensor, routing: Routing) -> Tensor:
        """What the experts make of (T, hidden_size)."""
        routed: Tensor = self.experts(x, routing)
        if self.shared_expert is None:
            return routed
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return routed + shared
