"""Policy losses (GRPO, GSPO, CISPO), the supervised loss, distillation, and estimates of KL."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from rl_backend.algorithm import surrogates
from rl_backend.algorithm.loss_aggregation import (
    aggregate_loss,
    aggregation_terms,
    check_loss_agg_mode,
    check_not_negative,
    differentiable_entropy,
    required_output,
    token_advantages,
    token_mean_metric,
    token_vector,
    zero_masked,
)
from rl_backend.algorithm.surrogates import MetricPair
from rl_backend.contracts import EPISODE_SHARE, TARGET_IDS, BatchError, ConfigError, MetricValue, ModelOutput, PackedBatch


def _k3(difference: Tensor) -> Tensor:
    negated = (-difference).clamp(min=-20.0, max=20.0)
    # exp(x) - x - 1 of policies near each other is less than the rounding of exp(x).
    return (negated.expm1() - negated).clamp(min=-10.0, max=10.0)


_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("k1", "kl"), lambda difference: difference),
    **dict.fromkeys(("k2", "mse"), lambda difference: 0.5 * difference.square()),
    **dict.fromkeys(("k3", "low_var_kl"), _k3),
    "abs": Tensor.abs,
}

KL_TYPES: tuple[str, ...] = (*_ESTIMATORS, *(f"{name}+" for name in _ESTIMATORS))


def check_kl_type(kl_type: str) -> None:
    if kl_type not in KL_TYPES:
        raise ConfigError.of("kl_type", kl_type, f"must be one of {', '.join(KL_TYPES)}")


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kl_type: str = "k3") -> Tensor:
    """One estimate per token, nats, in the shape of ``log_probs``. With ``d = log_probs - ref_log_probs``:

    - ``k1`` (``kl``): ``d``; unbiased, its gradient is 0 in expectation.
    - ``k2`` (``mse``): ``d**2 / 2``; biased, its gradient is that of KL(policy || reference) in expectation.
    - ``k3`` (``low_var_kl``): ``exp(-d) + d - 1``; unbiased and never negative, its gradient is that of KL(reference ||
      policy) in expectation; ``-d`` is limited to [-20, 20] and the result to [-10, 10], beyond which the gradient is 0.
    - ``abs``: ``|d|``.
    - a name with ``+``, for example ``k3+``: that value with the gradient of ``k2`` (straight through).

    Expectations are over tokens that the policy itself samples. Losses give this term no importance weights.

    Sources: J. Schulman, http://joschu.net/blog/kl-approx.html; names and limits are those of verl's ``kl_penalty``.
    """
    check_kl_type(kl_type)
    difference = log_probs - ref_log_probs
    value = _ESTIMATORS[kl_type.removesuffix("+")](difference)
    if not kl_type.endswith("+"):
        return value
    # Straight through: the value of the named estimator, the gradient of k2.
    surrogate = 0.5 * difference.square()
    return surrogate - surrogate.detach() + value.detach()


type Surrogate = Callable[..., tuple[Tensor, dict[str, MetricPair]]]
"""A loss per token of ``log_probs``, ``old_log_probs``, ``advantages`` and ``loss_mask``, (T,) each, and metrics.

It takes ``clip_ratio_low`` and ``clip_ratio_high`` by name and, where it has such parameters, ``clip_ratio_c`` and
``seq_lens``.
"""


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLoss:
    """Surrogate * importance weights + ``kl_coef`` * KL to a reference - ``entropy_coef`` * entropy; a
    :class:`~rl_backend.contracts.LossFn`.

    All three terms are aggregated in the same way, as in verl's ``ppo_loss``. Tokens with weight 0 still count in the
    denominators: dropping them makes the step smaller.

    Reads token fields, each (T,) and aligned as :mod:`rl_backend.contracts.batch` defines:
        ``loss_mask``; ``old_log_probs``; ``advantages`` (or a sequence field of that name, (B,)); ``ref_log_probs`` when
        ``kl_coef`` > 0; ``rollout_log_probs`` when ``tis_cap``, ``mis_bounds`` or ``importance_veto`` is given. For metrics
        alone: ``rollout_log_probs``, and ``old_entropy``, of the policy of ``old_log_probs``. With ``on_policy`` neither
        ``old_log_probs`` nor ``old_entropy``.

    Attributes:
        surrogate: one of :mod:`rl_backend.algorithm.surrogates`, or of your own.
        clip_ratio_low, clip_ratio_high: where the surrogate's importance ratio is clipped: 1 - low, 1 + high.
        clip_ratio_c: dual clip, of ``clipped_policy_loss`` alone; None switches it off.
        loss_agg_mode, loss_scale_factor: see :func:`~rl_backend.algorithm.loss_aggregation.aggregation_terms`.
        kl_coef: may be annealed to 0, where no reference is needed.
        kl_type: see :func:`kl_penalty`.
        tis_cap: see :func:`~rl_backend.algorithm.surrogates.truncated_importance_weights`.
        mis_bounds: see :func:`~rl_backend.algorithm.surrogates.masked_importance_weights`; instead of ``tis_cap``.
        importance_level: ``token`` or ``sequence``, of either.
        importance_veto: see :func:`~rl_backend.algorithm.surrogates.sequences_without_veto`; with or without weights.
        entropy_coef: weight of the entropy bonus, nats; needs ``meta["calculate_entropy"]``.
        on_policy: ``old_log_probs`` are those of this pass, detached: of a step's only update. They need no pass before it.

    Returns:
        The loss, and metrics as (sum, weight) pairs: ``policy_loss`` (the mean that is optimised), ``clip_fraction``,
        ``approx_kl``, ``zero_advantages`` (fraction of tokens that teach nothing); ``clip_fraction_lower`` with
        ``clip_ratio_c``; ``kl`` with ``kl_coef``; ``importance_weight`` and ``importance_dropped`` (fraction of tokens with
        weight 0) with an importance option; ``mask_disagreement`` with :attr:`~rl_backend.contracts.PackedBatch.cuts`
        (fraction of sampled tokens that this model would not sample, or by which it differs from the engine's
        ``sampling_mask``); ``entropy`` when the model gives it, else of
        ``old_entropy``; with ``rollout_log_probs`` also ``log_prob_gap``, the mean of ``|old_log_probs -
        rollout_log_probs|``, and ``rollout_kl``, the estimate k3 of KL(policy that sampled || policy of ``old_log_probs``),
        both in nats per token.

    Raises:
        BatchError: a field, output or denominator that is missing or has another shape.
    """

    surrogate: Surrogate = surrogates.clipped_policy_loss
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = None
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    kl_coef: float = 0.0
    kl_type: str = "k3"
    tis_cap: float | None = None
    mis_bounds: Sequence[float] | None = None
    importance_level: str = "token"
    importance_veto: float | None = None
    entropy_coef: float = 0.0
    on_policy: bool = False

    def __post_init__(self) -> None:
        if "clip_ratio_c" not in self._parameters and self.clip_ratio_c is not None:
            raise ConfigError.of(
                "clip_ratio_c", self.clip_ratio_c, "dual clip is ppo's; this surrogate has none: leave it None"
            )
        surrogates.check_clip_options(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c)
        check_loss_agg_mode(self.loss_agg_mode, self.loss_scale_factor)
        check_kl_type(self.kl_type)
        surrogates.check_importance_options(self.tis_cap, self.mis_bounds, self.importance_level, self.importance_veto)
        check_not_negative(kl_coef=self.kl_coef)
        if not math.isfinite(self.entropy_coef):
            raise ConfigError.of("entropy_coef", self.entropy_coef, "must be a finite number")

    def with_options(self, **options: Any) -> Self:
        """Raises TypeError for a name that it does not have."""
        return replace(self, **options)

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None, **options: Any
    ) -> tuple[Tensor, Mapping[str, MetricValue]]:
        # Options that are given at the call are checked now; with_options checks them before anything runs.
        if options:
            return self.with_options(**options)(model_output, data)
        log_probs = required_output(model_output, "log_probs")
        loss_mask = token_vector(data, "loss_mask")
        old_log_probs = log_probs.detach() if self.on_policy else token_vector(data, "old_log_probs")
        token_losses, metrics = self._surrogate_losses(log_probs, old_log_probs, loss_mask, data)
        if "rollout_log_probs" in data.token_fields or self._is_weighted:
            weights, measured = self._importance(old_log_probs, loss_mask, data)
            metrics |= measured
            token_losses = token_losses if weights is None else token_losses * weights
        loss = self._aggregated(token_losses, loss_mask, data)
        metrics["policy_loss"] = aggregation_terms(
            token_losses.detach(),
            loss_mask,
            data.seq_lens,
            self.loss_agg_mode,
            loss_scale_factor=self.loss_scale_factor,
            episode_share=data.sequence_fields.get(EPISODE_SHARE),
        )
        if self.kl_coef > 0:
            ref_log_probs = token_vector(data, "ref_log_probs")
            kl = kl_penalty(zero_masked(log_probs, loss_mask), zero_masked(ref_log_probs, loss_mask), self.kl_type)
            metrics["kl"] = token_mean_metric(kl, loss_mask)
            loss = loss + self.kl_coef * self._aggregated(kl, loss_mask, data)
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * self._aggregated(differentiable_entropy(model_output), loss_mask, data)
        entropy = model_output.entropy
        # The entropy of the first pass is nearly that of this one, and costs nothing.
        if entropy is None and not self.on_policy and "old_entropy" in data.token_fields:
            entropy = token_vector(data, "old_entropy")
        if entropy is not None:
            metrics["entropy"] = token_mean_metric(entropy.detach(), loss_mask)
        if model_output.mask_disagreement is not None:
            metrics["mask_disagreement"] = token_mean_metric(model_output.mask_disagreement, loss_mask)
        return loss, metrics

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.surrogate).parameters)

    @property
    def _is_weighted(self) -> bool:
        return self.tis_cap is not None or self.mis_bounds is not None or self.importance_veto is not None

    def _aggregated(self, token_losses: Tensor, loss_mask: Tensor, data: PackedBatch) -> Tensor:
        return aggregate_loss(token_losses, loss_mask, data, self.loss_agg_mode, loss_scale_factor=self.loss_scale_factor)

    def _surrogate_losses(
        self, log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor, data: PackedBatch
    ) -> tuple[Tensor, dict[str, MetricValue]]:
        advantages = token_advantages(data)
        # Only what the surrogate has a parameter for: users' own need neither.
        given = {"clip_ratio_c": self.clip_ratio_c, "seq_lens": data.seq_lens}
        token_losses, clipped = self.surrogate(
            log_probs,
            old_log_probs,
            advantages,
            loss_mask,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            **{name: value for name, value in given.items() if name in self._parameters},
        )
        silent = (advantages == 0).to(log_probs.dtype)
        return token_losses, {**clipped, "zero_advantages": token_mean_metric(silent, loss_mask)}

    def _importance(
        self, old_log_probs: Tensor, loss_mask: Tensor, data: PackedBatch
    ) -> tuple[Tensor | None, dict[str, MetricValue]]:
        """Weights of tokens, None without an importance option; and how far sampler and trainer are apart."""
        rollout_log_probs = token_vector(data, "rollout_log_probs")
        sampled, trained = (zero_masked(values, loss_mask) for values in (rollout_log_probs, old_log_probs))
        metrics: dict[str, MetricValue] = {
            "log_prob_gap": token_mean_metric((old_log_probs - rollout_log_probs).abs(), loss_mask),
            "rollout_kl": token_mean_metric(kl_penalty(sampled, trained, "k3"), loss_mask),
        }
        if not self._is_weighted:
            return None, metrics
        compared = old_log_probs, rollout_log_probs, loss_mask, data.seq_lens
        if self.tis_cap is not None:
            weights = surrogates.truncated_importance_weights(*compared, cap=self.tis_cap, level=self.importance_level)
        elif self.mis_bounds is not None:
            weights = surrogates.masked_importance_weights(*compared, bounds=self.mis_bounds, level=self.importance_level)
        else:
            weights = torch.ones_like(old_log_probs)
        if self.importance_veto is not None:
            weights = weights * surrogates.sequences_without_veto(*compared, veto=self.importance_veto)
        metrics["importance_weight"] = token_mean_metric(weights, loss_mask)
        metrics["importance_dropped"] = token_mean_metric((weights == 0).to(weights.dtype), loss_mask)
        return weights, metrics


policy_loss = PolicyGradientLoss()

grpo_loss = PolicyGradientLoss(clip_ratio_c=3.0)
"""PPO's clipped loss with dual clip, of PPO's actor and of GRPO, with verl's defaults.

Sources: PPO, https://arxiv.org/abs/1707.06347; GRPO, https://arxiv.org/abs/2402.03300, equation 3.
"""

gspo_loss = PolicyGradientLoss(
    surrogate=surrogates.gspo_policy_loss,
    clip_ratio_low=3e-4,
    clip_ratio_high=4e-4,
    loss_agg_mode="seq-mean-token-mean",
)
"""GSPO, https://arxiv.org/abs/2507.18071, with the paper's clip ratios: one ratio per sequence."""

cispo_loss = PolicyGradientLoss(surrogate=surrogates.cispo_policy_loss, clip_ratio_low=1.0)
"""CISPO, https://arxiv.org/abs/2506.13585, without a lower bound on the ratio: clipped weights."""


def sft_loss(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Negative log-likelihood of the tokens that ``loss_mask`` selects; a :class:`~rl_backend.contracts.LossFn`.

    ``token-mean`` is verl's ``sft_loss``. Metrics: ``nll``, the mean over the selected tokens, nats. Errors as of
    :func:`~rl_backend.algorithm.loss_aggregation.aggregate_loss`.
    """
    log_probs = required_output(model_output, "log_probs")
    loss_mask = data.token_field("loss_mask")
    loss = aggregate_loss(-log_probs, loss_mask, data, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    return loss, {"nll": token_mean_metric(-log_probs, loss_mask)}


KL_DIRECTIONS = ("forward", "reverse")


def top_k_kl(log_probs: Tensor, teacher_log_probs: Tensor, chosen: Tensor, direction: str = "forward") -> Tensor:
    """(T,): KL between teacher q and student p over K tokens and one bucket with all the others; nats, in float64.

    ``forward`` is KL(q || p), ``reverse`` KL(p || q), whose gradient goes through all the K log-probs and the bucket.

    Args:
        log_probs: (T, K), of the student, with a gradient.
        teacher_log_probs: (T, K), of the same, different tokens.
        chosen: (T, K) bool, which of the K there are; the others are not read.

    Raises:
        ConfigError: an unknown direction.
    """
    if direction not in KL_DIRECTIONS:
        raise ConfigError.of("direction", direction, f"must be one of {', '.join(KL_DIRECTIONS)}")
    student, teacher = (
        _with_rest(each.to(torch.float64), chosen) for each in (log_probs, teacher_log_probs.to(log_probs.device))
    )
    first, second = (teacher, student) if direction == "forward" else (student, teacher)
    terms = first.exp() * (first - second)
    return (terms[:, :-1] * chosen).sum(1) + terms[:, -1]


def _with_rest(log_probs: Tensor, chosen: Tensor) -> Tensor:
    """(T, K + 1): the last is the log-probability of all other tokens."""
    log_probs = torch.where(chosen, log_probs, 0.0)
    rest = 1.0 - (log_probs.exp() * chosen).sum(1, keepdim=True)
    # What float32 log-probs cannot tell from 0 has no gradient.
    return torch.cat([log_probs, rest.clamp(min=1e-7).log()], dim=1)


def distillation_loss(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    direction: str = "forward",
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """:func:`top_k_kl` to a teacher, of the tokens that ``loss_mask`` selects; a :class:`~rl_backend.contracts.LossFn`.

    Reads the token fields ``target_ids`` and ``teacher_log_probs``, (T, K), the tokens that the teacher holds for likeliest
    after each; ``loss_mask``, (T,); and what :func:`~rl_backend.algorithm.loss_aggregation.aggregate_loss` reads.

    Metrics: ``distillation_kl``, the mean over the selected tokens, nats.

    Raises:
        BatchError: a field, output or denominator that is missing or has another shape.
        ConfigError: an option.
    """
    log_probs, chosen = required_output(model_output, "log_probs"), data.token_field(TARGET_IDS) != -100
    teacher, loss_mask = data.token_field("teacher_log_probs"), token_vector(data, "loss_mask")
    if log_probs.dim() != 2 or teacher.shape != log_probs.shape:
        raise BatchError(
            f"teacher_log_probs has shape {tuple(teacher.shape)} and log_probs {tuple(log_probs.shape)}; each is (T, K)",
            name="teacher_log_probs",
        )
    kl = top_k_kl(log_probs, teacher, chosen, direction).to(log_probs.dtype)
    loss = aggregate_loss(kl, loss_mask, data, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    return loss, {"distillation_kl": token_mean_metric(kl, loss_mask)}
