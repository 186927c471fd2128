"""Held-out sets: their prompts, the answers between two steps, and what the rewards of these come to."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any, NamedTuple, Self

from actors.collect.sample_metrics import score, unknown_tokens
from actors.collect.stop_tokens import Ends
from actors.collect.transcripts import describe_episodes, describe_samples
from actors.options.eval_sets import EvalSet
from actors.rollout.config import SamplingConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import Sample, sample_seeds
from actors.watch.console import warn
from actors.watch.health_metrics import KNOWN, UNKNOWN
from rl_backend.contracts import ConfigError
from rl_backend.data.examples import Examples
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import RewardScorer, Score
from rl_backend.environment import Episode


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


@dataclass(frozen=True)
class HeldOutSet:
    """Prompts that are not trained on.

    Attributes:
        prompts: of class :class:`~rl_backend.data.prompts.Prompt`; of episodes, the rows that they are played with.
        pass_threshold: a response passes whose reward is at least this.
        note: what was done with prompts that are too long.
    """

    name: str
    prompts: Sequence[Any]
    sampling: SamplingConfig
    pass_at: tuple[int, ...]
    pass_threshold: float = 1.0
    note: str = ""

    @classmethod
    def of(cls, given: EvalSet, name: str, prompts: Sequence[Any], sampling: SamplingConfig, note: str = "") -> Self:
        # In order, and once where n is 1.
        pass_at = tuple(dict.fromkeys((1, sampling.n))) if given.pass_at is None else given.pass_at
        threshold = 1.0 if given.pass_threshold is None else given.pass_threshold
        return cls(name, prompts, sampling, pass_at, threshold, note)


def load_held_out(
    sets: Mapping[str, EvalSet],
    sampling: Mapping[str, SamplingConfig],
    load: Callable[..., Examples[Prompt]],
    new_ends: Callable[[], Ends],
) -> list[HeldOutSet]:
    """Reads held-out sets with ``load``, which is and raises as :func:`~rl_backend.data.prompts.load_prompts`."""
    found = []
    for name, each in sets.items():
        # What ends responses to one set may not end those to another.
        ends = new_ends()
        prompts = load(each.path, held_out=True, see=ends.see)
        how = ends.added_to(sampling[name])
        found.append(HeldOutSet.of(each, name, prompts, how, prompts.note and f"held-out set {name}: {prompts.note}"))
    return found


@dataclass(frozen=True)
class HeldOutResult:
    """Answers to a held-out set; samples and scores prompt by prompt."""

    held_out: HeldOutSet
    samples: Sequence[Sample]
    scores: Sequence[Score]

    @property
    def rewards(self) -> list[float]:
        return [score.value for score in self.scores]

    @property
    def failures(self) -> list[str]:
        return [failure for score in self.scores for failure in score.failures]

    @property
    def sampled_ids(self) -> Iterable[Sequence[int]]:
        return (sample.response_ids for sample in self.samples)

    @property
    def reward(self) -> float:
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
        prompts = [prompt for prompt in self.held_out.prompts for _ in range(self.held_out.sampling.n)]
        described = describe_samples(self.samples, prompts, self.scores, tokenizer)
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


@dataclass(frozen=True)
class HeldOutEpisodes(HeldOutResult):
    """Episodes of a held-out set, row by row; ``samples`` is empty, and an episode that failed has a reward of 0."""

    episodes: Sequence[Episode] = ()

    @property
    def sampled_ids(self) -> Iterable[Sequence[int]]:
        return (turn.token_ids for episode in self.episodes for turn in episode.turns)

    def lines(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"set": self.held_out.name, **line} for line in describe_episodes(self.episodes, tokenizer)]


def warn_of_unknown(result: HeldOutResult, tokenizer: Any, label: str = "") -> None:
    if unknown := unknown_tokens(result.sampled_ids, tokenizer):
        warn(f"held-out set {result.held_out.name}: {unknown} of the sampled tokens {UNKNOWN}; {KNOWN}", label)


def answer(
    rollout: RolloutGroup,
    sets: Sequence[HeldOutSet],
    tokenizer: Any,
    scorer: RewardScorer,
    *,
    seed: int,
    adapter: str | None = None,
) -> list[HeldOutResult]:
    """Answers and scores each set. Seeds are the same at every step, so that weights alone differ."""
    # All are asked for at once, so that engines have no pause between two sets.
    asked = []
    for index, held_out in enumerate(sets):
        sampling = held_out.sampling
        # Steps of training are counted from 1, so its samples have other seeds.
        seeds = sample_seeds(seed, -1 - index, len(held_out.prompts), sampling.n) if sampling.temperature else None
        prompts = [prompt.token_ids for prompt in held_out.prompts]
        asked.append(rollout.submit(prompts, sampling, seeds=seeds, adapter=adapter))
    results = []
    for held_out, pending in zip(sets, asked, strict=True):
        prompts = [prompt for prompt in held_out.prompts for _ in range(held_out.sampling.n)]
        samples = pending.result()
        results.append(HeldOutResult(held_out, samples, score(samples, prompts, tokenizer, scorer)))
    return results
