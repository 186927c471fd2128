"""Answers to held-out sets, and what their rewards come to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

from actors.rollout.group.group import RolloutGroup
from actors.rollout.sample import Sample, sample_seeds
from actors.run.console import warn
from actors.run.eval_sets import HeldOutSet
from actors.run.reward_scores import describe, score
from actors.run.vital_signs import KNOWN, UNKNOWN, unknown_tokens
from rl_backend.algorithm.estimates import Estimate, mean_over_prompts, pass_at_k
from rl_backend.data.rewards import RewardScorer, Score


@dataclass(frozen=True)
class HeldOutResult:
    """Answers to a held-out set; samples and scores prompt by prompt."""

    held_out: HeldOutSet
    samples: Sequence[Sample]
    scores: Sequence[Score]

    @property
    def rewards(self) -> list[float]:
        """Of each response."""
        return [score.value for score in self.scores]

    @property
    def failures(self) -> list[str]:
        """A message for each call of a reward function that failed."""
        return [failure for score in self.scores for failure in score.failures]

    @property
    def sampled_ids(self) -> Iterable[Sequence[int]]:
        """Of each response."""
        return (sample.response_ids for sample in self.samples)

    @property
    def reward(self) -> float:
        """Mean over all responses."""
        return statistics.fmean(self.rewards)

    @property
    def estimates(self) -> dict[str, Estimate]:
        """``mean@n``, the mean reward of the n responses, and ``pass@k``, each a mean over prompts."""
        sampled, n = self.held_out, self.held_out.sampling.n
        of_prompts = list(batched(self.rewards, n))
        passed = [sum(reward >= sampled.pass_threshold for reward in rewards) for rewards in of_prompts]
        found = {f"mean@{n}": mean_over_prompts([statistics.fmean(rewards) for rewards in of_prompts])}
        return found | {
            f"pass@{k}": mean_over_prompts([pass_at_k(n, count, k) for count in passed]) for k in sampled.pass_at
        }

    @property
    def metrics(self) -> dict[str, float]:
        """``eval/<set>/<estimate>``, and ``..._stderr`` where there are several prompts."""
        found: dict[str, float] = {}
        for name, (mean, error) in self.estimates.items():
            found[f"eval/{self.held_out.name}/{name}"] = mean
            if error is not None:
                found[f"eval/{self.held_out.name}/{name}_stderr"] = error
        return found

    def lines(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Lines of ``held_out.jsonl``."""
        prompts = [prompt for prompt in self.held_out.prompts for _ in range(self.held_out.sampling.n)]
        described = describe(self.samples, prompts, self.scores, tokenizer)
        return [{"set": self.held_out.name, **line} for line in described]

    def describe(self) -> str:
        """``mean@8 0.412 ± 0.020, pass@8 0.760 ± 0.043 (128 prompts, 8 responses each, temperature 0.7)``."""
        sampling = self.held_out.sampling
        shown = [
            f"{name} {mean:.3f}" + ("" if error is None else f" ± {error:.3f}")
            for name, (mean, error) in self.estimates.items()
        ]
        each = [f"{sampling.n} responses each"] if sampling.n > 1 else []
        how = f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"
        cuts = [f"{name} {getattr(sampling, name):g}" for name in sampling.cuts]
        return f"{', '.join(shown)} ({', '.join([f'{len(self.held_out.prompts)} prompts', *each, how, *cuts])})"


def answer(
    rollout: RolloutGroup,
    sets: Sequence[HeldOutSet],
    tokenizer: Any,
    scorer: RewardScorer,
    *,
    seed: int,
    adapter: str | None = None,
) -> list[HeldOutResult]:
    """Answers and scores each set. Seeds of sampled responses are the same at every step, so that weights alone differ."""
    results = []
    for index, held_out in enumerate(sets):
        sampling = held_out.sampling
        prompts = [prompt for prompt in held_out.prompts for _ in range(sampling.n)]
        # Steps of training are counted from 1, so its samples have other seeds.
        seeds = sample_seeds(seed, -1 - index, len(held_out.prompts), sampling.n) if sampling.temperature else None
        asked = [prompt.token_ids for prompt in held_out.prompts]
        samples = rollout.generate(asked, sampling, seeds=seeds, adapter=adapter)
        results.append(HeldOutResult(held_out, samples, score(samples, prompts, tokenizer, scorer)))
    return results


def warn_of_unknown(result: HeldOutResult, tokenizer: Any, label: str = "") -> None:
    """Says how many of the sampled tokens the tokenizer does not know, if any."""
    if unknown := unknown_tokens(result.sampled_ids, tokenizer):
        warn(f"held-out set {result.held_out.name}: {unknown} of the sampled tokens {UNKNOWN}; {KNOWN}", label)
