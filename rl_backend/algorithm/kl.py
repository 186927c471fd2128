"""Estimates of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

from torch import Tensor

from rl_backend.contracts import ConfigError

_ESTIMATORS = {
    "k1": "k1",
    "kl": "k1",
    "k2": "k2",
    "mse": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
    "abs": "abs",
}

KL_TYPES: tuple[str, ...] = (*_ESTIMATORS, *(f"{name}+" for name in _ESTIMATORS))


def check_kl_type(kl_type: str) -> None:
    """Raises :class:`ConfigError` for an unknown estimator."""
    if kl_type not in KL_TYPES:
        raise ConfigError.of("kl_type", kl_type, f"must be one of {', '.join(KL_TYPES)}")


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kl_type: str = "k3") -> Tensor:
    """One estimate per token, nats, in the shape of ``log_probs``. With ``d = log_probs - ref_log_probs``:

    - ``k1`` (``kl``): ``d``; unbiased, its gradient is 0 in expectation.
    - ``k2`` (``mse``): ``d**2 / 2``; biased, its gradient is that of the KL in expectation.
    - ``k3`` (``low_var_kl``): ``exp(-d) + d - 1``; unbiased and never negative; ``-d`` is limited to [-20, 20] and the
      result to [-10, 10], beyond which the gradient is 0.
    - ``abs``: ``|d|``.
    - a name with ``+``, for example ``k3+``: that value with the gradient of ``k2`` (straight through).

    Sources: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html; names and limits are verl's
    ``kl_penalty``.

    Args:
        log_probs: (T,) floating, of the policy.
        ref_log_probs: (T,) of the reference.

    Raises:
        ConfigError: an unknown ``kl_type``.
    """
    check_kl_type(kl_type)
    difference = log_probs - ref_log_probs
    value = _estimate(difference, _ESTIMATORS[kl_type.removesuffix("+")])
    if not kl_type.endswith("+"):
        return value
    surrogate = 0.5 * difference.square()
    return surrogate - surrogate.detach() + value.detach()


def _estimate(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "abs":
        return difference.abs()
    negated = (-difference).clamp(min=-20.0, max=20.0)
    return (negated.exp() - negated - 1.0).clamp(min=-10.0, max=10.0)
