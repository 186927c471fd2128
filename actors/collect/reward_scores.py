"""Rewards of samples: what reward functions are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.cluster.ray_watch import cluster_loss
from actors.cluster.session import raise_if_terminated
from actors.rollout.messages import Sample
from rl_backend.data.chat import decode
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import RewardCall, RewardConfig, RewardScorer, Score, Scoring


def load_scorer(config: RewardConfig) -> RewardScorer:
    """The reward functions of a run, which must not outlast a SIGTERM or the loss of Ray that they catch.

    Raises:
        ConfigError: see :meth:`RewardConfig.load`.
    """
    return config.load(check=_raise_what_was_caught)


def _raise_what_was_caught() -> None:
    raise_if_terminated()
    if (loss := cluster_loss()) is not None:
        raise loss


def begin_scoring(samples: Sequence[Sample], prompts: Sequence[Prompt], tokenizer: Any, scorer: RewardScorer) -> Scoring:
    """Begins with the scores of samples; ``prompts[i]`` is the one that ``samples[i]`` answers."""
    texts = [decode(sample.response_ids, tokenizer, special=False) for sample in samples]
    examples = [prompt.example for prompt in prompts]
    return scorer.begin(
        [
            RewardCall(example.data_source, text, example.ground_truth, example.extra_info, example.prompt)
            for text, example in zip(texts, examples, strict=True)
        ]
    )


def score(samples: Sequence[Sample], prompts: Sequence[Prompt], tokenizer: Any, scorer: RewardScorer) -> list[Score]:
    """The score of each sample; ``prompts[i]`` is the one that ``samples[i]`` answers.

    Raises:
        RewardError: a call that failed is to stop the run.
    """
    return begin_scoring(samples, prompts, tokenizer, scorer).result()
