"""Routers of mixtures of experts: the choice of experts, their load, and the losses that balance it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError
from rl_backend.primitive.activation import sigmoid
from rl_backend.primitive.adapters import padded_product
from rl_backend.primitive.backward import with_added_loss
from rl_backend.primitive.float32 import KeptInFloat32, wide_dtype
from rl_backend.primitive.prefix_tree import take_rows


class ExpertUse(NamedTuple):
    """Choices of the tokens of a micro-batch, without padding and without a gradient."""

    counts: Tensor  # (E,) int64, how often each expert was chosen
    num_tokens: Tensor  # 0-d int64


def expert_use(
    experts: Tensor,
    num_experts: int,
    padding: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
) -> ExpertUse:
    """Counts (T, top_k) choices of tokens that are no ``padding``; ``sum_over_ranks`` adds up those of the micro-batch's
    others.
    """
    num_tokens = experts.new_full((1,), experts.shape[0])
    if padding is not None:
        num_tokens = num_tokens - padding.sum()
        experts = experts.masked_fill(padding[:, None], num_experts)
    use = torch.cat((count_sorted(experts.flatten().sort().values, num_experts), num_tokens))
    if sum_over_ranks is not None:
        sum_over_ranks(use)
    return ExpertUse(use[:-1], use[-1])


def count_sorted(ordered: Tensor, num_experts: int) -> Tensor:
    """How often each expert stands in (N,) ascending numbers; (E,) int64."""
    # Unlike bincount it never waits for a device.
    ends = torch.searchsorted(ordered, torch.arange(num_experts, device=ordered.device), right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def expert_bias_step(counts: Tensor, rate: float) -> Tensor:
    """What one step of loss-free balancing adds to a bias: ``rate * sign(mean count - count_e)``; (E,) float32.

    Wang et al., arXiv 2408.15664, algorithm 1; ``rate`` is 0.001 there. ``counts``, (E,) int64, are of the whole batch.
    """
    # Whole numbers: a mean is rounded, and then no expert may have exactly as many as it.
    below_mean = torch.sign(counts.sum() - counts.numel() * counts)
    return rate * below_mean.to(torch.float32)


_TINY = 1e-20
"""Keeps a sum of sigmoid scores that all underflow from dividing by 0; no other sum is changed by it."""


@dataclass(frozen=True)
class RouterSettings:
    """The kind of a router: how it scores, chooses and weights experts.

    Raises:
        ConfigError: groups that do not share the experts out, or that a token finds too few experts in.
    """

    num_experts: int  # E
    top_k: int  # experts of each token
    score: Literal["softmax", "sigmoid"] = "softmax"  # over the experts, or of each alone (DeepSeek-V3, arXiv 2412.19437)
    score_after_top_k: bool = False  # softmax over the chosen logits only (Shazeer et al., arXiv 1701.06538)
    normalise: bool = False  # divide the weights of each token by their sum
    scaling_factor: float = 1.0  # what the weights are multiplied by at the end
    expert_bias: bool = False  # a bias in the choice alone, see :func:`expert_bias_step`
    rounded_logits: bool = False  # compute the logits in the dtype of the tokens, as some engines do
    bias: bool = False  # a trained one, of the logits
    groups: int = 1  # of neighbouring experts; 1 for a choice among all of them
    chosen_groups: int = 1  # those with the highest sums of their two highest scores

    def __post_init__(self) -> None:
        size, remainder = divmod(self.num_experts, self.groups)
        # A group counts with its two best experts.
        whole = not remainder and (self.groups == 1 or size > 1)
        if not whole or not 1 <= self.chosen_groups <= self.groups or self.top_k > self.chosen_groups * size:
            raise ConfigError(
                f"RouterSettings: groups={self.groups}, chosen_groups={self.chosen_groups} and top_k={self.top_k} of "
                f"num_experts={self.num_experts}: groups must be equal and have 2 experts or more, chosen_groups be 1 to "
                "groups, and top_k at most the experts in them"
            )


class Routing(NamedTuple):
    experts: Tensor  # (T, top_k) int64, all different in a row
    weights: Tensor  # (T, top_k) float32 (float64 for float64 inputs), of the chosen experts' outputs
    logits: Tensor  # (T, E), of the dtype of ``weights``


class ExpertBias(KeptInFloat32):
    """Adds ``values``, (E,) without a gradient, to the scores of experts, in the choice; (T, E) -> (T, E)."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        # A module for the sake of its dtype: it moves by steps that bfloat16 rounds away.
        self.values = nn.Parameter(torch.zeros(num_experts), requires_grad=False)

    def forward(self, scores: Tensor) -> Tensor:
        # Here and not by the router: what FSDP gathers for a module is gone after its forward.
        return scores + self.values.to(scores.dtype)


class Router(nn.Module):
    """A linear layer whose outputs choose ``top_k`` of E experts for each token.

    Computed in float32 or better, the logits too unless ``settings.rounded_logits``. ``weight`` is (E, hidden_size).
    """

    def __init__(self, hidden_size: int, settings: RouterSettings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.zeros(settings.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(settings.num_experts)) if settings.bias else None
        self.expert_bias = ExpertBias(settings.num_experts) if settings.expert_bias else None

    def forward(self, x: Tensor, experts: Tensor | None = None) -> Routing:
        """Routes (T, hidden_size). ``experts``, (T, top_k), are a choice made elsewhere, whose weights are still this
        router's; -1 in the rows of tokens for which it chooses itself.
        """
        dtype = wide_dtype(x.dtype)
        factors = x.dtype if self.settings.rounded_logits else dtype
        bias = None if self.bias is None else self.bias.to(factors)
        logits = padded_product(x.to(factors), self.weight.to(factors).t(), bias).to(dtype)
        chosen = choose_experts(logits, self.settings, self.expert_bias)
        experts = chosen if experts is None else torch.where(experts < 0, chosen, experts)
        return Routing(experts, expert_weights(logits, experts, self.settings), logits)

    def extra_repr(self) -> str:
        return str(self.settings)


@torch.no_grad()
def choose_experts(
    logits: Tensor, settings: RouterSettings, expert_bias: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The ``top_k`` experts with the highest scores, highest first; (T, E) -> (T, top_k) int64."""
    scores = logits
    if expert_bias is not None:
        # A bias is added to numbers between 0 and 1, not to logits.
        scores = expert_bias(_scores(logits, settings.score))
    elif not settings.score_after_top_k:
        # Rounding makes ties of logits that differ, and other implementations break them on the scores.
        scores = _scores(logits, settings.score)
    if settings.chosen_groups < settings.groups:
        scores = _within_groups(scores, settings)
    return scores.topk(settings.top_k, dim=-1).indices


def _within_groups(scores: Tensor, settings: RouterSettings) -> Tensor:
    grouped = scores.unflatten(1, (settings.groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(settings.chosen_groups, dim=-1).indices
    outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
    within: Tensor = grouped.masked_fill(outside[..., None], -torch.inf)
    return within.flatten(1)


def expert_weights(logits: Tensor, experts: Tensor, settings: RouterSettings) -> Tensor:
    """Weights of a choice, differentiable in ``logits``; (T, E) and (T, top_k) -> (T, top_k)."""
    if settings.score_after_top_k:
        weights = _scores(logits.gather(1, experts), settings.score)
    else:
        weights = _scores(logits, settings.score).gather(1, experts)
    if settings.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights if settings.scaling_factor == 1.0 else weights * settings.scaling_factor


def _scores(logits: Tensor, score: Literal["softmax", "sigmoid"]) -> Tensor:
    return logits.softmax(-1) if score == "softmax" else sigmoid(logits)


class RouterLossCoefficients(NamedTuple):
    load_balancing: float = 0.0  # factor of :func:`load_balancing_loss`
    z: float = 0.0  # factor of :func:`router_z_loss`
    sequence: float = 0.0  # factor of :func:`sequence_balancing_loss`


class RowSequences(NamedTuple):
    of_rows: Tensor  # (T,) int64, which sequence of the micro-batch each token is from; any number for padding
    number: int  # of sequences in the micro-batch, on all ranks
    rows: Tensor | None = None  # (T,) int64, the row of each token, where some are of several; None for its own

    def of_tokens(self, x: Tensor) -> Tensor:
        """(rows, ...) -> (T, ...)."""
        return x if self.rows is None else take_rows(x, self.rows)


def load_balancing_loss(
    routing: Routing, settings: RouterSettings, padding: Tensor | None = None, use: ExpertUse | None = None
) -> Tensor:
    """``E * sum_e f_e * P_e`` over the tokens of a micro-batch; 0-d, 1 when all experts are used alike.

    ``f_e`` is the part of the choices that fell on expert e, without a gradient, and ``P_e`` the mean over tokens of the
    score of e, scores of a token adding up to 1 (Switch Transformer, Fedus et al., arXiv 2101.03961, equations 4 to 6;
    for more than one expert of a token as Megatron-Core's ``switch_load_balancing_loss_func``).

    Args:
        padding: (T,) bool, tokens that do not count.
        use: of the whole micro-batch, where these are only some of its tokens; the loss is then their share.
    """
    if use is None:
        use = expert_use(routing.experts, settings.num_experts, padding)
    scores = _shares(routing.logits, settings)
    fractions = use.counts.to(scores.dtype) / (use.num_tokens * settings.top_k)
    return settings.num_experts * torch.dot(fractions, _without(padding, scores).sum(0) / use.num_tokens)


def _shares(logits: Tensor, settings: RouterSettings) -> Tensor:
    if settings.score == "softmax":
        return logits.softmax(-1)
    sigmoid = logits.sigmoid()
    return sigmoid / (sigmoid.sum(-1, keepdim=True) + _TINY)


def sequence_balancing_loss(
    logits: Tensor,
    settings: RouterSettings,
    sequences: RowSequences,
    padding: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """The mean over sequences of ``E * sum_e f_e * P_e`` within each (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).

    ``f_e`` is the part of the sequence's ``top_k`` highest scores that are of expert e, without the bias and the groups
    of the choice, and ``P_e`` the mean of its score, scores of a token adding up to 1.

    Args:
        logits: (T, E).
        padding: (T,) bool, tokens that do not count.
        sum_over_ranks: as in :func:`expert_use`; the loss is then the share of these tokens.
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
    """``mean over tokens of logsumexp(logits) ** 2`` (ST-MoE, Zoph et al., arXiv 2202.08906, equation 5); (T, E) -> 0-d."""
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

    Args:
        padding: (T,) bool, tokens that do not count.
        sum_over_ranks: as in :func:`expert_use`; gradients of the ranks add up to those of the whole micro-batch.
        sequences: which sequence each token is from; None for a micro-batch of one. With ``sequences.rows`` a row counts as
            often as it is a token's, and padding is none's.
    """
    if coefficients == RouterLossCoefficients() or not torch.is_grad_enabled():
        return routing
    sequences = sequences or RowSequences(routing.experts.new_zeros(routing.experts.shape[0]), 1)
    tokens = routing._replace(experts=sequences.of_tokens(routing.experts), logits=sequences.of_tokens(routing.logits))
    padding = padding if sequences.rows is None else None
    use = expert_use(tokens.experts, settings.num_experts, padding, sum_over_ranks)
    losses = routing.logits.new_zeros(())
    if coefficients.load_balancing:
        losses = losses + coefficients.load_balancing * load_balancing_loss(tokens, settings, padding, use)
    if coefficients.z:
        losses = losses + coefficients.z * router_z_loss(tokens.logits, padding, use)
    if coefficients.sequence:
        balance = sequence_balancing_loss(tokens.logits, settings, sequences, padding, sum_over_ranks)
        losses = losses + coefficients.sequence * balance
    return routing._replace(weights=with_added_loss(routing.weights, loss_weight * losses))
