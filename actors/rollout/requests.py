"""Checks a sampling call and divides it over the engines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.messages import EngineInfo, Request
from rl_backend.contracts import BatchError, ConfigError


def check_prompts(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    seeds: Sequence[int] | None,
    config: RolloutConfig,
    info: EngineInfo,
) -> None:
    """Refuses what no engine could answer.

    Args:
        prompts: token ids.
        seeds: one for each sample; None without any.
        config, info: of the engines; what one of them says of itself.

    Raises:
        BatchError: an empty or too long prompt, an unknown token id, a wrong number of seeds.
        ConfigError: stop strings, and engines without a tokenizer.
    """
    if not prompts:
        raise BatchError("prompts is empty; expected at least one prompt")
    if sampling.stop_strings and not config.load_tokenizer:
        raise ConfigError.of(
            "SamplingConfig.stop_strings",
            sampling.stop_strings,
            "engines find them in text and have no tokenizer; set RolloutConfig.load_tokenizer",
        )
    for index, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt, info.max_model_len, info.vocab_size):
            raise BatchError(f"prompt {index} {problem}", prompt=index)
    if seeds is not None and len(seeds) != len(prompts) * sampling.n:
        raise BatchError(
            f"{len(seeds)} seeds for {len(prompts)} prompts with n={sampling.n}; expected {len(prompts) * sampling.n}"
        )


def prompt_problem(prompt: Sequence[int], max_model_len: int, vocab_size: int) -> str:
    """Why no engine could answer a prompt, as a predicate; empty where one could."""
    if not 0 < len(prompt) < max_model_len:
        return (
            f"has {len(prompt)} tokens; expected 1 to {max_model_len - 1} "
            f"(max_model_len={max_model_len} holds prompt and response)"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"has token ids from {min(prompt)} to {max(prompt)}; expected 0 to {vocab_size - 1}"
    return ""


def requests_of(prompt: int, prompts: Sequence[Sequence[int]], n: int, seeds: Sequence[int] | None) -> list[Request]:
    """The requests for ``n`` responses of one prompt: one for all without seeds, else one for each of its seeds."""
    if seeds is None:
        return [Request(prompts[prompt], n, None)]
    return [Request(prompts[prompt], 1, seed) for seed in seeds[prompt * n : (prompt + 1) * n]]


def shares_of(count: int, engines: int) -> list[range]:
    """Consecutive prompts for each engine, as evenly as possible."""
    bounds = [count * engine // engines for engine in range(engines + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]
