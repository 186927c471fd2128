"""Texts and rewards of samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from actors import RolloutGroup, Sample, SamplingConfig
from adapters.verl.reward import RewardFunction, score_value
from examples.common.prompts import Prompt
from examples.common.run_folder import RunFolder


def score(samples: Sequence[Sample], prompts: Sequence[Prompt], tokenizer: Any, reward: RewardFunction) -> list[float]:
    """The reward of each sample; ``prompts`` has the one that it answers."""
    texts = tokenizer.batch_decode([sample.response_ids for sample in samples], skip_special_tokens=True)
    return [
        score_value(
            reward(
                data_source=prompt.example.data_source,
                solution_str=text,
                ground_truth=prompt.example.ground_truth,
                extra_info=prompt.example.extra_info,
            )
        )
        for text, prompt in zip(texts, prompts, strict=True)
    ]


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


class HeldOut:
    """Held-out prompts, answered greedily; the answers go to the run folder.

    Args:
        prompts: may be empty.
        sampling: how training samples; here one response of each prompt, at temperature 0.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        rollout: RolloutGroup,
        sampling: SamplingConfig,
        tokenizer: Any,
        reward: RewardFunction,
        folder: RunFolder,
    ) -> None:
        self.prompts = prompts
        self._rollout = rollout
        self._sampling = sampling.replace(n=1, temperature=0.0)
        self._tokenizer = tokenizer
        self._reward = reward
        self._folder = folder

    def accuracy(self, step: int) -> float | None:
        """Mean reward after ``step``, with the weights of the last push; None without prompts."""
        if not self.prompts:
            return None
        samples = self._rollout.generate([prompt.token_ids for prompt in self.prompts], self._sampling)
        rewards = score(samples, self.prompts, self._tokenizer, self._reward)
        self._folder.log_held_out(step, describe(samples, self.prompts, rewards, self._tokenizer))
        return statistics.fmean(rewards)
