"""Estimates from several responses to each prompt are without bias, and their errors are those of prompts."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from actors.collect.held_out import mean_over_prompts, pass_at_k
from rl_backend.contracts import ConfigError


@pytest.mark.shows("evaluation: pass@k is the share of all draws of k responses in which one passes")
def test_pass_at_k_is_the_share_of_all_draws_of_k_responses_in_which_one_passes() -> None:
    for n in range(1, 7):
        for passed in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([index < passed for index in range(n)], k))
                assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws)), (n, passed, k)
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 1, 5), (4, 1, 0)])
def test_numbers_that_cannot_be_are_refused(n: int, passed: int, k: int) -> None:
    with pytest.raises(ConfigError, match=r"the 4 responses"):
        pass_at_k(n, passed, k)


def test_the_error_is_that_of_the_mean_over_prompts() -> None:
    mean, error = mean_over_prompts([0.0, 1.0, 1.0, 1.0])
    assert mean == 0.75
    assert error == pytest.approx(math.sqrt(0.25 / 4))
    assert mean_over_prompts([0.5]) == (0.5, None)
