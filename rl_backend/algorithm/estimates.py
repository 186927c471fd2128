"""Estimates from several responses to each prompt, with standard errors."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from rl_backend.contracts import ConfigError


class Estimate(NamedTuple):
    """A mean over prompts.

    Attributes:
        error: standard error of the mean; None for a single prompt.
    """

    mean: float
    error: float | None


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """Mean and standard error of one value for each prompt.

    Responses to one prompt are alike, so prompts are what was drawn independently: the error is the standard deviation over
    prompts by the root of their number. Source: Miller, Adding Error Bars to Evals, https://arxiv.org/abs/2411.00640,
    section 2, where prompts are the clusters.

    Args:
        values: at least one.
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), error)


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """The probability that at least one of ``k`` of a prompt's responses passes, without bias: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al., Evaluating Large Language Models Trained on Code, https://arxiv.org/abs/2107.03374, equation 1.

    Args:
        responses: n, sampled in the same way.
        passed: c, those that pass.
        k: at most n.

    Raises:
        ConfigError: numbers that cannot be.
    """
    if not 1 <= k <= responses:
        raise ConfigError.of("k", k, f"pass@k takes k of the {responses} responses to a prompt; use 1 to {responses}")
    if not 0 <= passed <= responses:
        raise ConfigError.of("passed", passed, f"there are {responses} responses")
    return 1.0 - math.comb(responses - passed, k) / math.comb(responses, k)
