"""Keeping a router's experts evenly used: losses, and the bias that needs none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.router import RouterSettings, Routing


class RouterLossCoefficients(NamedTuple):
    """Attributes:
    load_balancing: what :func:`load_balancing_loss` is multiplied by.
    z: what :func:`router_z_loss` is multiplied by.
    """

    load_balancing: float = 0.0
    z: float = 0.0


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen; (T, top_k) int64 -> (E,) int64."""
    return count_sorted(experts.flatten().sort().values, num_experts)


def count_sorted(ordered: Tensor, num_experts: int) -> Tensor:
    """How often each expert stands in (N,) ascending numbers; (E,) int64. Unlike bincount it never waits for a device."""
    ends = torch.searchsorted(ordered, torch.arange(num_experts, device=ordered.device), right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def load_balancing_loss(routing: Routing, settings: RouterSettings) -> Tensor:
    """``E * sum_e f_e * P_e`` over the T tokens of a micro-batch; 0-d, 1 when all experts are used alike.

    ``f_e`` is the part of the ``T * top_k`` choices that fell on expert e, without a gradient, and ``P_e`` the mean over
    tokens of the score of e, scores of a token adding up to 1 (Switch Transformer, Fedus et al., arXiv 2101.03961, equations
    4 to 6, for ``top_k`` = 1; for more, as Megatron-Core's ``switch_load_balancing_loss_func``. transformers' ``aux_loss``
    takes all layers together and is ``top_k`` times as large).
    """
    counts = tokens_per_expert(routing.experts, settings.num_experts)
    fractions = counts.to(routing.logits.dtype) / routing.experts.numel()
    if settings.score == "softmax":
        scores = routing.logits.softmax(-1)
    else:
        sigmoid = routing.logits.sigmoid()
        scores = sigmoid / (sigmoid.sum(-1, keepdim=True) + 1e-20)
    return settings.num_experts * torch.dot(fractions, scores.mean(0))


def router_z_loss(logits: Tensor) -> Tensor:
    """``mean over tokens of logsumexp(logits) ** 2`` (ST-MoE, Zoph et al., arXiv 2202.08906, equation 5); (T, E) -> 0-d."""
    return logits.logsumexp(-1).square().mean()


def with_router_losses(
    routing: Routing, settings: RouterSettings, coefficients: RouterLossCoefficients, loss_weight: float
) -> Routing:
    """The same routing, whose weights bring the gradient of the losses into the backward pass, times ``loss_weight``.

    The value of the loss that is differentiated does not change.
    """
    if coefficients == RouterLossCoefficients() or not torch.is_grad_enabled():
        return routing
    losses = routing.logits.new_zeros(())
    if coefficients.load_balancing:
        losses = losses + coefficients.load_balancing * load_balancing_loss(routing, settings)
    if coefficients.z:
        losses = losses + coefficients.z * router_z_loss(routing.logits)
    return routing._replace(weights=_WithLoss.apply(routing.weights, loss_weight * losses))


def balanced_expert_bias(expert_bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias after one step of loss-free balancing: ``b_e + rate * sign(mean count - count_e)``.

    Wang et al., arXiv 2408.15664, algorithm 1.

    Args:
        expert_bias: (E,).
        counts: (E,) tokens of the whole batch, of all micro-batches and ranks, that chose each expert.
        rate: the paper takes 0.001 for sigmoid scores.
    """
    counts = counts.to(expert_bias.dtype)
    return expert_bias + rate * torch.sign(counts.mean() - counts)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())
