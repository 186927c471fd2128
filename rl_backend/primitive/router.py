"""Routers: choosing experts for tokens and weighting what they return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError
from rl_backend.primitive.activation import sigmoid
from rl_backend.primitive.adapted_linear import padded_product
from rl_backend.primitive.float32 import KeptInFloat32

_TINY = 1e-20
"""Keeps a sum of sigmoid scores that all underflow from dividing by 0; no other sum is changed by it."""


@dataclass(frozen=True)
class RouterSettings:
    """The kind of a router: how it scores, chooses and weights experts.

    Attributes:
        num_experts: E.
        top_k: experts of each token, at most E.
        score: ``softmax`` over the experts, or ``sigmoid`` of each alone (DeepSeek-V3, arXiv 2412.19437, equation 15).
        score_after_top_k: the softmax runs over the logits of the chosen experts only (Shazeer et al., arXiv 1701.06538)
            instead of over all of them.
        normalise: divide the weights of each token by their sum.
        scaling_factor: what the weights are multiplied by at the end.
        expert_bias: add a bias to the scores in the choice, and only there (Wang et al., arXiv 2408.15664). It is no
            trained parameter; see :func:`rl_backend.primitive.expert_use.expert_bias_step`.
        rounded_logits: compute the logits in the dtype of the tokens, and only what follows in float32. Engines that do so
            choose other experts for some tokens than those that do not.
        bias: the logits have a bias, which is trained.
        groups: of neighbouring experts; 1 for a choice among all of them.
        chosen_groups: groups whose experts a token may be sent to: those with the highest sums of their two highest scores
            (DeepSeek-V3, section 2.1.2).

    Raises:
        ConfigError: groups that do not share the experts out, or that a token finds too few experts in.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    score_after_top_k: bool = False
    normalise: bool = False
    scaling_factor: float = 1.0
    expert_bias: bool = False
    rounded_logits: bool = False
    bias: bool = False
    groups: int = 1
    chosen_groups: int = 1

    def __post_init__(self) -> None:
        if self.num_experts % self.groups:
            raise ConfigError.of("RouterSettings.groups", self.groups, f"does not divide num_experts={self.num_experts}")
        size = self.num_experts // self.groups
        if self.groups > 1 and size < 2:
            raise ConfigError.of("RouterSettings.groups", self.groups, "leaves 1 expert in each, where two are added up")
        if not 1 <= self.chosen_groups <= self.groups:
            raise ConfigError.of("RouterSettings.chosen_groups", self.chosen_groups, f"expected 1 to groups={self.groups}")
        if self.top_k > self.chosen_groups * size:
            problem = f"chosen_groups={self.chosen_groups} have {self.chosen_groups * size} experts"
            raise ConfigError.of("RouterSettings.top_k", self.top_k, problem)


class Routing(NamedTuple):
    """Attributes:
    experts: (T, top_k) int64, all different in a row.
    weights: (T, top_k) float32 (float64 for float64 inputs), of the chosen experts' outputs.
    logits: (T, E), of the dtype of ``weights``.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor


class ExpertBias(KeptInFloat32):
    """Adds to the scores of experts, in the choice; (T, E) -> (T, E).

    A module of its own for the sake of its dtype: it moves by steps that bfloat16 rounds away.

    Attributes:
        values: (E,), without a gradient.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(num_experts), requires_grad=False)

    def forward(self, scores: Tensor) -> Tensor:
        # Here and not by the router: what FSDP gathers for a module is gone after its forward.
        return scores + self.values.to(scores.dtype)


class Router(nn.Module):
    """A linear layer whose outputs choose ``top_k`` of E experts for each token.

    Computed in float32 or better, the logits too unless ``settings.rounded_logits``.

    Attributes:
        weight: (E, hidden_size).
        bias: (E,), of the logits; None where the settings have none.
        expert_bias: None where the settings have none.
    """

    def __init__(self, hidden_size: int, settings: RouterSettings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.zeros(settings.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(settings.num_experts)) if settings.bias else None
        self.expert_bias = ExpertBias(settings.num_experts) if settings.expert_bias else None

    def forward(self, x: Tensor, experts: Tensor | None = None) -> Routing:
        """Routes (T, hidden_size).

        Args:
            experts: (T, top_k) integers, a choice made elsewhere, whose weights are still this router's; -1 in the rows of
                tokens for which it chooses itself.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
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
    """The ``top_k`` experts with the highest scores, highest first; (T, E) -> (T, top_k) int64.

    Scores are those that the weights are made of, so that a bias is added to numbers between 0 and 1; without a bias the
    logits have the same order.
    """
    scores = logits
    if expert_bias is not None:
        scores = expert_bias(_scores(logits, settings.score))
    elif not settings.score_after_top_k:
        # Rounding makes ties of logits that differ, and other implementations break them on the scores.
        scores = _scores(logits, settings.score)
    if settings.chosen_groups < settings.groups:
        scores = _within_groups(scores, settings)
    return scores.topk(settings.top_k, dim=-1).indices


def _within_groups(scores: Tensor, settings: RouterSettings) -> Tensor:
    """(T, E) scores, of which those outside of the best groups are minus infinity."""
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
