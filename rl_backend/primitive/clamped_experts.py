"""Experts with clamped gates and biases, in the layout of gpt-oss (arXiv 2508.10925)."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_backend.primitive.activation import sigmoid
from rl_backend.primitive.adapted_experts import adapted_experts
from rl_backend.primitive.experts import Experts
from rl_backend.primitive.grouped_linear import grouped_linear
from rl_backend.primitive.router import Routing

LIMIT = 7.0
"""Of gates, from above, and of what they gate, from both sides."""
_SHARPNESS = 1.702
"""Of the sigmoid, with which ``x * sigmoid(1.702 x)`` is near GELU."""


class ClampedExperts(Experts):
    """``down((up + 1) * gate * sigmoid(1.702 * gate))`` of clamped gates and ups, with biases.

    Matrices lie as in Hugging Face directories: inputs before outputs, and gates and ups in turn.

    Attributes:
        gate_up_proj: (E, hidden_size, 2 * intermediate_size), ``[..., 0::2]`` of the gates.
        gate_up_proj_bias: (E, 2 * intermediate_size).
        down_proj: (E, intermediate_size, hidden_size).
        down_proj_bias: (E, hidden_size), which a token's router weights multiply too.
        beside_adapters: whether a row has the same bits whatever rows are beside it, as passes of tenants need; the experts
            are frozen then.
    """

    intermediate_dims: ClassVar[Mapping[str, int | None]] = {
        # A part of pairs of gates and ups has both of each.
        "gate_up_proj": 2,
        "gate_up_proj_bias": 1,
        "down_proj": 1,
        "down_proj_bias": None,
    }

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(num_experts)
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, hidden_size, 2 * intermediate_size))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(num_experts, 2 * intermediate_size))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, intermediate_size, hidden_size))
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.beside_adapters = False

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """As the base class."""
        tokens = self.dispatch(x, routing, None)
        product: Callable[[Tensor, Tensor, Tensor], Tensor] = _frozen_product if self.beside_adapters else grouped_linear
        # Which of this rank's experts each row is for.
        numbers = torch.arange(len(tokens.counts), device=x.device)
        experts = torch.repeat_interleave(numbers, tokens.counts, output_size=len(tokens.rows))
        gate_up = product(tokens.rows, self.gate_up_proj.transpose(1, 2), tokens.counts)
        hidden: Tensor = _Gated.apply(gate_up, self.gate_up_proj_bias, experts, tokens.weights)
        output = product(hidden, self.down_proj.transpose(1, 2), tokens.counts)
        added: Tensor = _WithBias.apply(output, self.down_proj_bias, experts, tokens.weights)
        return tokens.combine(added)

    def extra_repr(self) -> str:
        experts, intermediate_size, hidden_size = self.down_proj.shape
        return f"{experts} experts, hidden_size={hidden_size}, intermediate_size={intermediate_size}"


def _frozen_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return adapted_experts(x, weight[:, None], counts, (), ())


class _Gated(torch.autograd.Function):
    """The weighted activation of (N, 2 * size) gates and ups in turn, to which each row's expert adds its bias.

    Keeps its inputs alone, computes in float32.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, bias, experts, weights)
        gate, up = _with_bias(gate_up, bias, experts, weights.dtype)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (gate * sigmoid(_SHARPNESS * gate)).mul_(up.add_(1.0)).mul_(weights[:, None]).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor]:
        gate_up, bias, experts, weights = ctx.saved_tensors
        whole_gate, whole_up = _with_bias(gate_up, bias, experts, weights.dtype)
        gate, factor = whole_gate.clamp(max=LIMIT), whole_up.clamp(-LIMIT, LIMIT).add_(1.0)
        shares = sigmoid(_SHARPNESS * gate)
        activated, grad = gate * shares, grad.to(weights.dtype)
        grad_weights = (grad * activated * factor).sum(-1)
        grad = grad * weights[:, None]
        of_gate = (shares + _SHARPNESS * activated * (1.0 - shares)).mul_(factor).mul_(grad)
        of_up = activated.mul_(grad)
        grad_gate_up = torch.empty(gate_up.shape, dtype=weights.dtype, device=gate_up.device)
        grad_gate_up[:, 0::2] = of_gate.mul_(whole_gate <= LIMIT)
        grad_gate_up[:, 1::2] = of_up.mul_(whole_up.abs() <= LIMIT)
        of_bias = _sum_by_expert(grad_gate_up, experts, bias) if ctx.needs_input_grad[1] else None
        return grad_gate_up.to(gate_up.dtype), of_bias, None, grad_weights


class _WithBias(torch.autograd.Function):
    """Rows plus the biases of their experts, times their weights; computes in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(bias, experts, weights)
        return rows + (bias.to(weights.dtype)[experts] * weights[:, None]).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor]:
        bias, experts, weights = ctx.saved_tensors
        wide = grad.to(weights.dtype)
        of_bias = _sum_by_expert(wide * weights[:, None], experts, bias) if ctx.needs_input_grad[1] else None
        return grad, of_bias, None, (wide * bias.to(weights.dtype)[experts]).sum(-1)


def _with_bias(gate_up: Tensor, bias: Tensor, experts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gates and ups, (N, size) each."""
    whole = gate_up.to(dtype) + bias.to(dtype)[experts]
    return whole[:, 0::2], whole[:, 1::2]


def _sum_by_expert(rows: Tensor, experts: Tensor, bias: Tensor) -> Tensor:
    """(N, features) -> (E, features): a product, because adding rows up one by one takes any order on CUDA."""
    members = experts == torch.arange(len(bias), device=rows.device)[:, None]
    return (members.to(rows.dtype) @ rows).to(bias.dtype)
