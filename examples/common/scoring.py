"""Texts and rewards of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors import Sample
from actors.cluster.watch import cluster_loss
from adapters.verl.reward import RewardFunction, score_value
from examples.common.prompts import Prompt
from examples.common.termination import raise_if_terminated
from rl_backend.contracts import BatchError


def score(samples: Sequence[Sample], prompts: Sequence[Prompt], tokenizer: Any, reward: RewardFunction) -> list[float]:
    """The reward of each sample; ``prompts`` has the one that it answers."""
    texts = tokenizer.batch_decode([sample.response_ids for sample in samples], skip_special_tokens=True)
    return [_score(text, prompt, reward) for text, prompt in zip(texts, prompts, strict=True)]


def _score(text: str, prompt: Prompt, reward: RewardFunction) -> float:
    example = prompt.example
    try:
        result = reward(
            data_source=example.data_source,
            solution_str=text,
            ground_truth=example.ground_truth,
            extra_info=example.extra_info,
        )
    except SystemExit as error:
        raise_if_terminated()
        raise BatchError(
            f"the reward function ended the process, {error!r}, on the response {text!r}; have it return a number"
        ) from error
    raise_if_terminated()
    if (loss := cluster_loss()) is not None:  # which the reward function may have caught
        raise loss
    return score_value(result)


def describe(
    samples: Sequence[Sample], prompts: Sequence[Prompt], rewards: Sequence[float], tokenizer: Any
) -> list[dict[str, Any]]:
    """Lines of ``samples.jsonl``; ``version_spans`` are (weight version, tokens) in the order of the response."""
    return [
        {
            "prompt": tokenizer.decode(sample.prompt_ids),
            "response": tokenizer.decode(sample.response_ids),
            "reward": reward,
            "ground_truth": prompt.example.ground_truth,
            "version_spans": [list(span) for span in sample.version_spans],
            "finish_reason": sample.finish_reason,
        }
        for sample, prompt, reward in zip(samples, prompts, rewards, strict=True)
    ]
