"""Distributions that are cut to some tokens, by sorting all of them: what log-probs are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_backend.contracts import SamplingCuts


def kept_by_vllm(logits: Tensor, cuts: SamplingCuts) -> Tensor:
    """(T, V) bool, by sorting: the definition of its parameters."""
    probabilities = logits.softmax(-1)
    kept = probabilities >= cuts.min_p * probabilities.amax(-1, keepdim=True)
    logits = logits.masked_fill(~kept, -torch.inf)
    if 0 < cuts.top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(cuts.top_k).values[:, -1:], -torch.inf)
    ascending, order = logits.sort(-1)
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - cuts.top_p
    dropped[:, -1] = False
    return (logits > -torch.inf) & ~torch.zeros_like(kept).scatter(1, order, dropped)


def of_kept(logits: Tensor, labels: Tensor, cuts: SamplingCuts) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy, and where the label is not kept; with a mask, what it and ``cuts`` differ by."""
    kept, asked, column = kept_by_vllm(logits.detach(), cuts), labels != -100, labels.clamp(min=0)[:, None]
    differs = (~kept.gather(1, column)[:, 0] & asked).double()
    if cuts.mask is not None:
        own = kept
        kept = torch.stack([torch.isin(torch.arange(logits.shape[1]), words) for words in cuts.mask.long()])
        differs = ((own ^ kept).sum(1).double() / (own | kept).sum(1)).where(asked, 0.0)
    distribution = logits.masked_fill(~kept.scatter(1, column, True), -torch.inf).log_softmax(-1)
    probabilities = distribution.exp()
    entropy = -(probabilities * distribution.where(probabilities > 0, 0.0)).sum(-1)
    return distribution.gather(1, column)[:, 0].where(asked, 0.0), entropy.where(asked, 0.0), differs


def mask_beside(logits: Tensor, labels: Tensor, cuts: SamplingCuts, seed: int = 0) -> Tensor:
    """(T, K) int32: a mask near the words that ``cuts`` keep. Some of them are not in it and others are, but for a third."""
    generator = torch.Generator().manual_seed(seed)
    kept, rows = kept_by_vllm(logits, cuts), []
    for place, (own, label) in enumerate(zip(kept, labels.tolist(), strict=True)):
        draw = torch.rand(len(own), generator=generator)
        words = own if place % 3 == 0 else (own & (draw > 0.3)) | (draw < 4 / len(own))
        rows.append(sorted({*words.nonzero()[:, 0].tolist(), label} - {-100}) if label != -100 else [])
    mask = torch.full((len(rows), max(map(len, rows))), -1, dtype=torch.int32)
    for place, words in enumerate(rows):
        mask[place, : len(words)] = torch.tensor(words, dtype=torch.int32)
    return mask
