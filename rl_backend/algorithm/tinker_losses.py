"""Losses of Tinker's API: sums over tokens and sequences, of which gradients add up over calls.

Each is a :class:`~rl_backend.contracts.LossFn` with options as keyword arguments. All need the token field ``target_ids``
and read the others, aligned with it, only where a target is not -100. lp is the log-prob of a target, q that of the policy
which sampled it (``logprobs``), A its advantage and r = exp(lp - q).

``cross_entropy`` takes (T,) or (T, K) targets. The others take one for each token: of K the first, and -100 for the rest, as
they are in a pass with tenants that have more.

Metrics: ``loss:sum``, whose ``sum`` is the loss over all micro-batches and ranks, and whose mean is that per target.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_backend.algorithm.loss_aggregation import (
    aggregate_loss,
    aggregation_terms,
    broadcast_to_tokens,
    required_output,
    sum_by_sequence,
    zero_masked,
)
from rl_backend.contracts import TARGET_IDS, BatchError, MetricValue, ModelOutput, PackedBatch

type Result = tuple[Tensor, Mapping[str, MetricValue]]


def cross_entropy(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Result:
    """``-sum w lp``; token field ``weights``, in the shape of the targets, of any sign.

    Raises:
        BatchError: a missing field, or another shape than the targets'.
    """
    log_probs, asked = required_output(model_output, "log_probs"), data.token_field(TARGET_IDS) != -100
    return _summed(-_like(data, "weights", asked) * log_probs, asked, data)


def importance_sampling(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Result:
    """``-sum r A``; token fields ``logprobs`` and ``advantages``, (T,).

    Raises:
        BatchError: a missing field, another shape than (T,), or several targets for one token.
    """
    terms = _Terms(model_output, data)
    return terms.summed(-terms.ratio() * terms.advantages)


def ppo(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Result:
    """``-sum min(r A, clip(r, low, high) A)``, with thresholds of the ratio itself.

    Token fields as of :func:`importance_sampling`; fields of the names of the thresholds, (T,), take their place.
    """
    terms = _Terms(model_output, data)
    ratio = terms.ratio()
    return terms.summed(-_pessimistic(ratio, terms.clipped(ratio, clip_low_threshold, clip_high_threshold), terms))


def cispo(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> Result:
    """``-sum sg(clip(r, low, high)) lp A``, sg the stop-gradient; token fields as of :func:`ppo`."""
    terms = _Terms(model_output, data)
    weight = terms.clipped(terms.ratio().detach(), clip_low_threshold, clip_high_threshold)
    return terms.summed(-weight * terms.log_probs * terms.advantages)


def dro(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None, *, beta: float = 0.05) -> Result:
    """``-sum (lp A - beta / 2 (lp - q)^2)``, also where A is 0; token fields as of :func:`importance_sampling`."""
    terms = _Terms(model_output, data)
    return terms.summed(0.5 * beta * terms.log_ratio.square() - terms.log_probs * terms.advantages)


def gspo(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Result:
    """:func:`ppo` with the ratio ``sg(s) p / sg(p)``, where s is exp of the mean of lp - q over a sequence.

    The mean is over the tokens where the token field ``sequence_ratio_mask``, (T,), is not 0.
    """
    terms = _Terms(model_output, data)
    mask = (_like(data, "sequence_ratio_mask", terms.asked) != 0).to(terms.log_probs.dtype)
    total = sum_by_sequence(terms.log_ratio.detach() * mask, data.seq_lens)
    mean = total / sum_by_sequence(mask, data.seq_lens).clamp(min=1.0)
    own = terms.log_probs - terms.log_probs.detach()
    ratio = zero_masked(broadcast_to_tokens(mean, data.seq_lens) + own, terms.advantages).exp()
    return terms.summed(-_pessimistic(ratio, terms.clipped(ratio, clip_low_threshold, clip_high_threshold), terms))


class _Terms:
    """What the losses with advantages are made of; all (T,), 0 where a token has no target."""

    def __init__(self, model_output: ModelOutput, data: PackedBatch) -> None:
        log_probs, targets = required_output(model_output, "log_probs"), data.token_field(TARGET_IDS)
        if targets.dim() == 2:
            if bool((targets[:, 1:] != -100).any()):
                raise BatchError(
                    f"{TARGET_IDS} has several targets for one token; only cross_entropy takes that",
                    name=TARGET_IDS,
                )
            log_probs, targets = log_probs[:, 0], targets[:, 0]
        self.data, self.log_probs, self.asked = data, log_probs, targets != -100
        self.advantages = _like(data, "advantages", self.asked)
        self.log_ratio = log_probs - _like(data, "logprobs", self.asked)

    def ratio(self) -> Tensor:
        # Where the advantage is 0 any ratio is right, and one that overflows would make it NaN.
        return zero_masked(self.log_ratio, self.advantages).exp()

    def clipped(self, ratio: Tensor, low: float, high: float) -> Tensor:
        bounds = [
            _like(self.data, name, self.asked) if name in self.data.token_fields else ratio.new_tensor(value)
            for name, value in (("clip_low_threshold", low), ("clip_high_threshold", high))
        ]
        return torch.clamp(ratio, *bounds)

    def summed(self, token_losses: Tensor) -> Result:
        return _summed(token_losses, self.asked, self.data)


def _pessimistic(ratio: Tensor, clipped: Tensor, terms: _Terms) -> Tensor:
    return torch.minimum(ratio * terms.advantages, clipped * terms.advantages)


def _like(data: PackedBatch, name: str, asked: Tensor) -> Tensor:
    """A token field, which must have the shape of ``asked``, with 0 where that is False."""
    value = data.token_field(name)
    if value.shape != asked.shape:
        raise BatchError(
            f"token field {name!r} has shape {tuple(value.shape)}; expected {tuple(asked.shape)}, that of {TARGET_IDS}",
            name=name,
        )
    return zero_masked(value, asked)


def _summed(losses: Tensor, asked: Tensor, data: PackedBatch) -> Result:
    losses, lengths = losses.flatten(), data.seq_lens
    mask = asked.flatten()
    total, count = aggregation_terms(losses.detach(), mask, lengths, "sum")
    return aggregate_loss(losses, mask, data, "sum"), {"loss:sum": (total, count)}
