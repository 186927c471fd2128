"""Metrics of a step's samples: responses to prompts, or episodes."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.rollout.messages import Sample
from rl_backend.algorithm.sequences import truncated_share
from rl_backend.data.chat_template import decode, known_token_ids
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import RewardCall, RewardScorer, Score, Scoring
from rl_backend.environment import Episode
from rl_backend.environment.groups import FAILED
from rl_backend.environment.playing import OF_ENVIRONMENTS


def begin_scoring(samples: Sequence[Sample], prompts: Sequence[Prompt], tokenizer: Any, scorer: RewardScorer) -> Scoring:
    """Begins with the scores of samples; ``prompts[i]`` is the one that ``samples[i]`` answers."""
    texts = [decode(sample.response_ids, tokenizer, special=False) for sample in samples]
    examples = [prompt.example for prompt in prompts]
    return scorer.begin(
        [
            RewardCall(
                *(example.data_source, text, example.ground_truth, example.extra_info, example.prompt),
                response_ids=sample.response_ids,
                columns=example.columns,
            )
            for text, example, sample in zip(texts, examples, samples, strict=True)
        ]
    )


def score(samples: Sequence[Sample], prompts: Sequence[Prompt], tokenizer: Any, scorer: RewardScorer) -> list[Score]:
    """As :func:`begin_scoring`, and waits; raises :class:`RewardError` where a call that failed is to stop the run."""
    return begin_scoring(samples, prompts, tokenizer, scorer).result()


# Metrics of every episode; those beside them are its environment's.
OF_THE_SAMPLER = frozenset(
    {
        *("turns", "segments", "sampled_tokens", "prompt_tokens", "cached_tokens", "tool_calls", "failed_tool_calls"),
        *("engine_seconds", "seconds", "environment_seconds"),
    }
)


@dataclass(frozen=True)
class ScoredGroup:
    """The responses to one prompt, which ``prompts`` has as many times."""

    prompts: list[Prompt]
    samples: list[Sample]
    scores: list[Score]

    @property
    def rewards(self) -> list[float]:
        return [score.value for score in self.scores]


def spread_of_rewards(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of all rewards ``reward`` and ``reward_std``; ``equal_groups`` is the share of groups whose rewards are all equal, of
    those with at least two.
    """
    rewards = [reward for group in groups for reward in group]
    metrics = {"reward": statistics.fmean(rewards), "reward_std": statistics.pstdev(rewards)}
    compared = [group for group in groups if len(group) > 1]
    if compared:
        metrics["equal_groups"] = statistics.fmean(len(set(group)) == 1 for group in compared)
    return metrics


def sample_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Over all responses. ``responses_cut_off`` is the share that ended at the length limit."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.response_ids) for sample in samples]
    return spread_of_rewards([group.rewards for group in groups]) | {
        "prompt_tokens": statistics.fmean(len(sample.prompt_ids) for sample in samples),
        "response_tokens": statistics.fmean(lengths),
        "response_tokens_max": max(lengths),
        "responses_cut_off": statistics.fmean(sample.finish_reason == "length" for sample in samples),
    }


def unknown_tokens(sampled: Iterable[Sequence[int]], tokenizer: Any) -> int:
    """How many of the sampled ids the tokenizer has no token for: they decode to nothing."""
    # Engines do not mask them: log-probs would be of another distribution than the trainer's, which is over all ids.
    known = known_token_ids(tokenizer)
    return sum(token not in known for token_ids in sampled for token in token_ids)


def episode_metrics(groups: Sequence[Sequence[Episode]], dropped: Sequence[Episode] = ()) -> dict[str, float]:
    """Over all episodes that are trained on, unless noted; at least one.

    ``segments``: above 1 where the history began anew. ``response_tokens``: sampled. ``tool_calls_failed``: share of the
    calls. ``prompt_tokens_cached``: share of the turns' prompts that engines did not compute again. ``environment_share``:
    of the episodes' time. ``episodes_cut_off``: share that a limit ended. ``stop/<reason>`` and ``episodes_failed``: shares
    of all episodes, with those that were dropped. ``episode/<name>``: means of the environments' metrics.
    """
    episodes = [episode for group in groups for episode in group]
    sampled = [sum(len(turn.token_ids) for turn in episode.turns) for episode in episodes]
    metrics = spread_of_rewards([[episode.reward for episode in group] for group in groups]) | {
        "turns": statistics.fmean(len(episode.turns) for episode in episodes),
        "turns_max": max(len(episode.turns) for episode in episodes),
        "segments": statistics.fmean(len(episode.segments) for episode in episodes),
        "response_tokens": statistics.fmean(sampled),
        "response_tokens_max": max(sampled),
        "tool_calls": statistics.fmean(_number(episode, "tool_calls") for episode in episodes),
        "episodes_cut_off": truncated_share(episodes),
    }
    for name, part, whole in (
        ("tool_calls_failed", "failed_tool_calls", "tool_calls"),
        ("prompt_tokens_cached", "cached_tokens", "prompt_tokens"),
        ("environment_share", "environment_seconds", "seconds"),
    ):
        total = sum(_number(episode, whole) for episode in episodes)
        if total:
            metrics[name] = sum(_number(episode, part) for episode in episodes) / total
    everyone = [*episodes, *dropped]
    for reason, times in sorted(Counter(episode.stop for episode in everyone).items()):
        metrics[f"stop/{reason}"] = times / len(everyone)
    metrics["episodes_failed"] = statistics.fmean(episode.stop in FAILED for episode in everyone)
    return metrics | _of_environments(episodes)


def _of_environments(episodes: Sequence[Episode]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            if name not in OF_THE_SAMPLER:
                values.setdefault(OF_ENVIRONMENTS + name.removeprefix(OF_ENVIRONMENTS), []).append(value)
    return {name: statistics.fmean(found) for name, found in sorted(values.items())}


def _number(episode: Episode, name: str) -> float:
    return episode.metrics.get(name, 0.0)
