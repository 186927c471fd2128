"""Estimates from several responses to each prompt, with standard errors."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from rl_backend.contracts import ConfigError


class Estimate(NamedTuple):
    """A mean over prompts, and its standard error; None for a single prompt."""

    mean: float
    error: float | None


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """Mean and standard error of one value for each prompt. Source: Miller, https://arxiv.org/abs/2411.00640, section 2."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """The probability that at least one of ``k`` of a prompt's responses passes, without bias: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., https://arxiv.org/abs/2107.03374, equation 1.
    """
    if not 1 <= k <= responses:
        raise ConfigError.of("k", k, f"pass@k takes k of the {responses} responses to a prompt; use 1 to {responses}")
    return 1.0 - math.comb(responses - passed, k) / math.comb(responses, k)
