"""Choosing experts for tokens and weighting what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_TINY = 1e-20
"""Keeps a sum of sigmoid scores that all underflow from dividing by 0; no other sum is changed by it."""


@dataclass(frozen=True)
class RouterSettings:
    """What kind of router.

    Attributes:
        num_experts: E.
        top_k: experts of each token, at most E.
        score: ``softmax`` over the experts, or ``sigmoid`` of each alone (DeepSeek-V3, arXiv 2412.19437, equation 15).
        score_after_top_k: the softmax runs over the logits of the chosen experts only (Shazeer et al., arXiv 1701.06538)
            instead of over all of them.
        normalise: divide the weights of each token by their sum.
        scaling_factor: what the weights are multiplied by at the end.
        expert_bias: add a bias to the scores in the choice, and only there (Wang et al., arXiv 2408.15664). It is no
            trained parameter; see :func:`rl_backend.primitive.router_balance.balanced_expert_bias`.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    score_after_top_k: bool = False
    normalise: bool = False
    scaling_factor: float = 1.0
    expert_bias: bool = False


class Routing(NamedTuple):
    """Attributes:
    experts: (T, top_k) int64, all different in a row.
    weights: (T, top_k) float32 (float64 for float64 inputs), of the chosen experts' outputs.
    logits: (T, E), of the dtype of ``weights``.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor


class Router(nn.Module):
    """A linear layer whose outputs choose ``top_k`` of E experts for each token. Computed in float32 or better.

    Attributes:
        weight: (E, hidden_size).
        expert_bias: (E,), without a gradient; None where the settings have none.
    """

    def __init__(self, hidden_size: int, settings: RouterSettings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.zeros(settings.num_experts, hidden_size))
        bias = nn.Parameter(torch.zeros(settings.num_experts), requires_grad=False) if settings.expert_bias else None
        self.expert_bias = bias

    def forward(self, x: Tensor, experts: Tensor | None = None) -> Routing:
        """Routes (T, hidden_size).

        Args:
            experts: (T, top_k) integers, a choice made elsewhere, whose weights are still this router's; -1 in the rows of
                tokens for which it chooses itself.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        chosen = choose_experts(logits, self.settings, self.expert_bias)
        experts = chosen if experts is None else torch.where(experts < 0, chosen, experts)
        return Routing(experts, expert_weights(logits, experts, self.settings), logits)

    def extra_repr(self) -> str:
        return str(self.settings)


@torch.no_grad()
def choose_experts(logits: Tensor, settings: RouterSettings, expert_bias: Tensor | None = None) -> Tensor:
    """The ``top_k`` experts with the highest scores, highest first; (T, E) -> (T, top_k) int64.

    Scores are those that the weights are made of, so that a bias is added to numbers between 0 and 1; without a bias the
    logits have the same order.
    """
    scores = logits
    if expert_bias is not None:
        scores = _scores(logits, settings.score) + expert_bias.to(logits.dtype)
    elif not settings.score_after_top_k:
        # Rounding makes ties of logits that differ, and other implementations break them on the scores.
        scores = _scores(logits, settings.score)
    return scores.topk(settings.top_k, dim=-1).indices


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
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()
