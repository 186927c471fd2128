"""What an RL run reads before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors import SamplingConfig
from adapters.verl.reward import RewardFunction, load_reward_function
from examples.common.json_file import read_object
from examples.common.prompts import Prompt, endless_batches, load_prompts, load_tokenizer
from examples.common.rl_config import RLConfig
from examples.common.router_replay import require_experts
from rl_backend.contracts import ConfigError


@dataclass(frozen=True)
class Inputs:
    """Tokenizer, reward function, prompts, and how to sample."""

    tokenizer: Any
    reward: RewardFunction
    prompts: list[Prompt]
    held_out: list[Prompt]
    batches: Iterator[list[Prompt]]
    sampling: SamplingConfig


def load_inputs(config: RLConfig) -> Inputs:
    """Reads everything that ``config`` names.

    Raises:
        ConfigError, BatchError: a file or folder that is missing or cannot be used.
    """
    require_experts(f"{type(config).__name__}.router_replay", config.router_replay, config.model)
    tokenizer = load_tokenizer(config.model)
    prompts = load_prompts(config.dataset, tokenizer, config.max_prompt_tokens)
    held_out = load_prompts(config.eval_dataset, tokenizer, config.max_prompt_tokens) if config.eval_dataset else []
    return Inputs(
        tokenizer=tokenizer,
        reward=load_reward_function(config.reward),
        prompts=prompts,
        held_out=held_out,
        batches=endless_batches(prompts, config.prompts_per_step, config.seed),
        sampling=config.sampling_config(stop_token_ids(config.model, tokenizer)),
    )


def stop_token_ids(model: str, tokenizer: Any) -> tuple[int, ...]:
    """What ends a response: the tokenizer's end-of-text token and those that ``generation_config.json`` names.

    Chat models end a turn with another token than a text.

    Raises:
        ConfigError: that file is damaged.
    """
    path = Path(model) / "generation_config.json"
    try:
        named = read_object(path).get("eos_token_id") if path.exists() else None
        ids = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(token) is int for token in ids):
            raise ValueError(f"eos_token_id={named!r}, expected a token id or a list of them")
    except (OSError, ValueError) as error:
        raise ConfigError.of(
            "model", model, f"generation_config.json cannot be used: {error}; put it right or remove it"
        ) from None
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ids]))
