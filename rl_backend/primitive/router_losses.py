"""Losses of routers that keep experts evenly used."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.expert_use import ExpertUse, expert_use
from rl_backend.primitive.router import RouterSettings, Routing


class RouterLossCoefficients(NamedTuple):
    """Attributes:
    load_balancing: factor of :func:`load_balancing_loss`.
    z: factor of :func:`router_z_loss`.
    """

    load_balancing: float = 0.0
    z: float = 0.0


def load_balancing_loss(
    routing: Routing, settings: RouterSettings, padding: Tensor | None = None, use: ExpertUse | None = None
) -> Tensor:
    """``E * sum_e f_e * P_e`` over the tokens of a micro-batch; 0-d, 1 when all experts are used alike.

    ``f_e`` is the part of the choices that fell on expert e, without a gradient, and ``P_e`` the mean over tokens of the
    score of e, scores of a token adding up to 1 (Switch Transformer, Fedus et al., arXiv 2101.03961, equations 4 to 6, for
    ``top_k`` = 1; for more, as Megatron-Core's ``switch_load_balancing_loss_func``. transformers' ``aux_loss`` takes all
    layers together and is ``top_k`` times as large).

    Args:
        padding: (T,) bool, tokens that do not count.
        use: of the whole micro-batch, where these are only some of its tokens; the loss is then their share, and the shares
            add up to it.
    """
    if use is None:
        use = expert_use(routing.experts, settings.num_experts, padding)
    if settings.score == "softmax":
        scores = routing.logits.softmax(-1)
    else:
        sigmoid = routing.logits.sigmoid()
        scores = sigmoid / (sigmoid.sum(-1, keepdim=True) + 1e-20)
    fractions = use.counts.to(scores.dtype) / (use.num_tokens * settings.top_k)
    return settings.num_experts * torch.dot(fractions, _without(padding, scores).sum(0) / use.num_tokens)


def router_z_loss(logits: Tensor, padding: Tensor | None = None, use: ExpertUse | None = None) -> Tensor:
    """``mean over tokens of logsumexp(logits) ** 2`` (ST-MoE, Zoph et al., arXiv 2202.08906, equation 5); (T, E) -> 0-d.

    Args:
        padding, use: as in :func:`load_balancing_loss`.
    """
    squares = _without(padding, logits.logsumexp(-1).square())
    if use is None:
        return squares.sum() / (squares.numel() if padding is None else (~padding).sum())
    return squares.sum() / use.num_tokens


def _without(padding: Tensor | None, values: Tensor) -> Tensor:
    return values if padding is None else values.masked_fill(padding.view(-1, *(1,) * (values.dim() - 1)), 0.0)


def with_router_losses(
    routing: Routing,
    settings: RouterSettings,
    coefficients: RouterLossCoefficients,
    loss_weight: float,
    padding: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
) -> Routing:
    """The same routing, whose weights bring the gradient of the losses into the backward pass, times ``loss_weight``.

    The value of the loss that is differentiated does not change.

    Args:
        padding: (T,) bool, tokens that do not count.
        sum_over_ranks: adds a tensor up, in place, over the ranks that have the other tokens of the micro-batch. The losses
            are those of all of its tokens, and the gradients of the ranks add up to theirs.
    """
    if coefficients == RouterLossCoefficients() or not torch.is_grad_enabled():
        return routing
    use = expert_use(routing.experts, settings.num_experts, padding, sum_over_ranks)
    losses = routing.logits.new_zeros(())
    if coefficients.load_balancing:
        losses = losses + coefficients.load_balancing * load_balancing_loss(routing, settings, padding, use)
    if coefficients.z:
        losses = losses + coefficients.z * router_z_loss(routing.logits, padding, use)
    return routing._replace(weights=_WithLoss.apply(routing.weights, loss_weight * losses))


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())
