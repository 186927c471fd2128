"""The feed-forward blocks of a mixture of experts, all in two packed weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_backend.primitive.dispatch import LocalDispatcher, TokenDispatcher
from rl_backend.primitive.grouped_linear import grouped_linear
from rl_backend.primitive.router import Routing


class SwiGLUExperts(nn.Module):
    """E gated feed-forward blocks, ``down(silu(gate(x)) * up(x))``, on the tokens that a router gave them.

    Attributes:
        gate_up_proj: (E, 2, intermediate_size, hidden_size): ``[e, 0]`` is the gate of expert e, ``[e, 1]`` its
            up-projection. Experts and intermediate features are dimensions of their own, so that each can be sharded.
        down_proj: (E, hidden_size, intermediate_size).
        dispatcher: what brings tokens to the experts; replace it where they are on several ranks.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 2, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, hidden_size, intermediate_size))
        self.dispatcher: TokenDispatcher = LocalDispatcher(num_experts)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """(T, hidden_size) -> (T, hidden_size): the weighted sum of what each token's experts return."""
        tokens = self.dispatcher.dispatch(x, routing)
        gate_up = grouped_linear(tokens.rows, self.gate_up_proj.flatten(1, 2), tokens.counts)
        # The down-projection is linear: weighting what goes in costs less than weighting what comes out.
        hidden: Tensor = _WeightedSwiGLU.apply(gate_up, tokens.weights)
        return self.dispatcher.combine(grouped_linear(hidden, self.down_proj, tokens.counts), tokens)

    def extra_repr(self) -> str:
        experts, _, intermediate_size, hidden_size = self.gate_up_proj.shape
        return f"{experts} experts, hidden_size={hidden_size}, intermediate_size={intermediate_size}"


class _WeightedSwiGLU(torch.autograd.Function):
    """``silu(gate) * up * weight``; (N, 2 * size) and (N,) -> (N, size). Keeps its inputs alone, computes in float32."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        gate, up = gate_up.to(weights.dtype).chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(weights[:, None]).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weights = ctx.saved_tensors
        gate, up = gate_up.to(weights.dtype).chunk(2, dim=-1)
        grad = grad.to(weights.dtype)
        activated = F.silu(gate)
        grad_gate_up = torch.empty(gate_up.shape, dtype=weights.dtype, device=gate_up.device)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        grad_weights = (grad_up * up).sum(-1)
        grad_up.mul_(weights[:, None])
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate)).mul_(weights[:, None])
        return grad_gate_up.to(gate_up.dtype), grad_weights
