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
    sequence: factor of :func:`sequence_balancing_loss`.
    """

    load_balancing: float = 0.0
    z: float = 0.0
    sequence: float = 0.0


class RowSequences(NamedTuple):
    """Attributes:
    of_rows: (T,) int64, which sequence of the micro-batch each token is from; any number for padding.
    number: of sequences in the micro-batch, on all ranks.
    """

    of_rows: Tensor
    number: int


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
    scores = _shares(routing.logits, settings)
    fractions = use.counts.to(scores.dtype) / (use.num_tokens * settings.top_k)
    return settings.num_experts * torch.dot(fractions, _without(padding, scores).sum(0) / use.num_tokens)


def _shares(logits: Tensor, settings: RouterSettings) -> Tensor:
    """Scores of each token, which add up to 1."""
    if settings.score == "softmax":
        return logits.softmax(-1)
    sigmoid = logits.sigmoid()
    return sigmoid / (sigmoid.sum(-1, keepdim=True) + 1e-20)


def sequence_balancing_loss(
    logits: Tensor,
    settings: RouterSettings,
    sequences: RowSequences,
    padding: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """The mean over sequences of ``E * sum_e f_e * P_e`` within each (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).

    ``f_e`` is the part of the sequence's ``top_k`` highest scores that are of expert e, without the bias and the groups of
    the choice, and ``P_e`` the mean of its score, scores of a token adding up to 1.

    Args:
        logits: (T, E).
        padding: (T,) bool, tokens that do not count.
        sum_over_ranks: adds a tensor up, in place, over the ranks that have the other tokens of the micro-batch. The loss is
            then the share of these tokens, and the shares add up to it.
    """
    num_experts = settings.num_experts
    rows = sequences.of_rows.clamp(0, sequences.number - 1)
    counted = torch.ones_like(rows) if padding is None else (~padding).to(rows.dtype)
    highest = logits.detach().topk(settings.top_k, dim=-1).indices + rows[:, None] * num_experts
    counts = rows.new_zeros(sequences.number * (num_experts + 1))
    counts.scatter_add_(0, highest.flatten(), counted.repeat_interleave(settings.top_k))
    counts.scatter_add_(0, rows + sequences.number * num_experts, counted)
    if sum_over_ranks is not None:
        sum_over_ranks(counts)
    of_experts, lengths = counts.split((sequences.number * num_experts, sequences.number))
    shares = _shares(logits, settings)
    of_rows, lengths_of_rows = of_experts.view(-1, num_experts)[rows].to(shares.dtype), lengths[rows].to(shares.dtype)
    losses = (shares * of_rows).sum(-1) * num_experts / (settings.top_k * lengths_of_rows.square())
    return _without(padding, losses).sum() / sequences.number


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
    sequences: RowSequences | None = None,
) -> Routing:
    """The same routing, whose weights bring the gradient of the losses into the backward pass, times ``loss_weight``.

    The value of the loss that is differentiated does not change.

    Args:
        padding: (T,) bool, tokens that do not count.
        sum_over_ranks: adds a tensor up, in place, over the ranks that have the other tokens of the micro-batch. The losses
            are those of all of its tokens, and the gradients of the ranks add up to theirs.
        sequences: which sequence each token is from; None for a micro-batch of one.
    """
    if coefficients == RouterLossCoefficients() or not torch.is_grad_enabled():
        return routing
    use = expert_use(routing.experts, settings.num_experts, padding, sum_over_ranks)
    losses = routing.logits.new_zeros(())
    if coefficients.load_balancing:
        losses = losses + coefficients.load_balancing * load_balancing_loss(routing, settings, padding, use)
    if coefficients.z:
        losses = losses + coefficients.z * router_z_loss(routing.logits, padding, use)
    if coefficients.sequence:
        sequences = sequences or RowSequences(routing.experts.new_zeros(routing.experts.shape[0]), 1)
        balance = sequence_balancing_loss(routing.logits, settings, sequences, padding, sum_over_ranks)
        losses = losses + coefficients.sequence * balance
    return routing._replace(weights=_WithLoss.apply(routing.weights, loss_weight * losses))


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())
