"""DeepSeek-V3.2's sparse attention, number by number, from the published formulas (arXiv 2512.02556, section 2.1).

Independent of ``rl_backend``: one sequence, one query and one head at a time, sorting in Python.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scores(query: Tensor, key: Tensor, weight: Tensor) -> list[Tensor]:
    """Equation 1: of each query t, the scores of the keys 0 to t; (T, heads, dim), (T, dim), (T, heads)."""
    rows = []
    for t in range(query.shape[0]):
        row = [
            sum(
                (weight[t, h] * torch.relu(torch.dot(query[t, h], key[s])) for h in range(query.shape[1])), key.new_zeros(())
            )
            for s in range(t + 1)
        ]
        rows.append(torch.stack(row))
    return rows


def choices(rows: list[Tensor], top_k: int) -> list[list[int]]:
    """The ``top_k`` keys of each query, of equal scores those with the lowest numbers; ascending."""
    return [
        sorted(sorted(range(len(row)), key=lambda s, row=row: (-row[s].item(), s))[:top_k])
        for row in rows  # type: ignore[misc]
    ]


def attention(query: Tensor, key: Tensor, value: Tensor, chosen: list[list[int]], scale: float) -> Tensor:
    """Equation 2: (T, heads, dim), (T, heads, dim), (T, heads, value_dim) -> (T, heads, value_dim)."""
    outputs = []
    for t, keys in enumerate(chosen):
        heads = []
        for h in range(query.shape[1]):
            weights = _probabilities(query[t, h], key[:, h], keys, scale)
            heads.append(sum((weights[i] * value[s, h] for i, s in enumerate(keys)), torch.zeros_like(value[0, 0])))
        outputs.append(torch.stack(heads))
    return torch.stack(outputs)


def divergence(rows: list[Tensor], query: Tensor, key: Tensor, chosen: list[list[int]], scale: float) -> Tensor:
    """Equations 3 and 4: summed over the queries."""
    total = rows[0].new_zeros(())
    for t, keys in enumerate(chosen):
        heads = [_probabilities(query[t, h], key[:, h], keys, scale) for h in range(query.shape[1])]
        attended = torch.stack(heads).sum(0).detach()
        attended = attended / attended.sum()
        log_of_scores = rows[t][keys] - torch.logsumexp(rows[t][keys], 0)
        total = total + sum(p * (math.log(p.item()) - log_of_scores[i]) for i, p in enumerate(attended) if p.item() > 0)
    return total


def rotated(x: Tensor, positions: Tensor, theta: float, *, interleaved: bool) -> Tensor:
    """Rotary embedding of (T, ..., dim): pairs of neighbours, or of features half of ``dim`` apart."""
    half, out = x.shape[-1] // 2, torch.empty_like(x)
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = position * theta ** (-2 * i / x.shape[-1])
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            out[t, ..., a] = x[t, ..., a] * math.cos(angle) - x[t, ..., b] * math.sin(angle)
            out[t, ..., b] = x[t, ..., b] * math.cos(angle) + x[t, ..., a] * math.sin(angle)
    return out


def _probabilities(query: Tensor, key: Tensor, keys: list[int], scale: float) -> Tensor:
    logits = torch.stack([torch.dot(query, key[s]) * scale for s in keys])
    return torch.exp(logits - torch.logsumexp(logits, 0))
