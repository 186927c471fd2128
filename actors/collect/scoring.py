"""What sampled texts are worth: each goes to the reward function with the row that it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.rollout.messages import Sample
from rl_backend.data.chat_template import decode
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import RewardCall, RewardScorer, Score, Scoring


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
