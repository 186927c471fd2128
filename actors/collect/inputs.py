"""Inputs of a run that samples: tokenizer, prompts and reward functions, or rows and environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from actors.collect.held_out import HeldOutSet, load_held_out
from actors.collect.reward_scores import load_scorer
from actors.collect.stop_tokens import Ends, stop_token_ids
from actors.options.sampled_config import EpisodeConfig, RLConfig
from actors.rollout.config import SamplingConfig
from actors.train.model import require_experts, require_known_end
from rl_backend.contracts import BatchError, ConfigError, RLBackendError
from rl_backend.data.chat_template import turn_end
from rl_backend.data.examples import open_dataset
from rl_backend.data.prompts import Prompt, endless_batches, load_prompts, load_tokenizer
from rl_backend.data.rewards import RewardScorer
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.environment.conversation import ChatFormat
from rl_backend.environment.playing import run_episodes
from rl_backend.environment.protocol import Player, Score, load_environment, load_player, load_score
from rl_backend.environment.stepping import StepOptions, SteppedPlayer
from rl_backend.options.option_set import filled

type Row = Mapping[str, Any]


@dataclass(frozen=True)
class Inputs:
    """Tokenizer, reward functions, prompts, and how to sample.

    Attributes:
        notes: what was done with prompts that are too long, for the run's first line.
    """

    tokenizer: Any
    reward: RewardScorer
    prompts: Sequence[Prompt]
    held_out: Sequence[HeldOutSet]
    batches: Iterator[list[Prompt]]
    sampling: SamplingConfig
    notes: tuple[str, ...] = ()


def load_inputs(config: RLConfig) -> Inputs:
    """Reads everything that ``config`` names.

    Raises:
        ConfigError, BatchError: a file or folder that is missing or cannot be used.
    """
    require_experts(f"{type(config).__name__}.router_replay", config.router_replay, config.model)
    tokenizer = load_tokenizer(config.model)
    require_known_end(f"{type(config).__name__}.model", config.model, tokenizer)
    reward = load_scorer(config.rewards)
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=config.max_prompt_tokens,
        data=config.data,
        require_answer=reward.needs_ground_truth,
    )
    new_ends = partial(Ends, config.model, tokenizer, config.data)
    ends = new_ends()
    prompts = load(config.dataset, see=ends.see)
    held_out = load_held_out(config.eval_sets, config.eval_sampling, load, new_ends)
    if len(prompts) < config.prompts_per_step:
        raise ConfigError.of(
            f"{type(config).__name__}.prompts_per_step",
            config.prompts_per_step,
            f"{config.dataset} has {len(prompts)} prompts; use at most that",
        )
    return Inputs(
        tokenizer=tokenizer,
        reward=reward,
        prompts=prompts,
        held_out=held_out,
        batches=endless_batches(prompts, config.prompts_per_step, config.seed),
        sampling=ends.added_to(config.sampling),
        notes=tuple(note for note in (prompts.note, *(each.note for each in held_out)) if note),
    )


@dataclass(frozen=True)
class EpisodeInputs:
    """Tokenizer, player and rows.

    Attributes:
        player: plays an episode in the run's environment.
        score: of a group's episodes; None without.
        ends: tokens that end any turn, whoever samples it: those of tokenizer, ``generation_config.json`` and chat template.
        notes: how the chat template is used, for the run's first line.
    """

    tokenizer: Any
    player: Player
    score: Score | None
    rows: Sequence[Row]
    held_out: Sequence[HeldOutSet]
    batches: Iterator[list[Row]]
    ends: Sequence[int] = ()
    notes: tuple[str, ...] = ()


def load_episode_inputs(config: EpisodeConfig) -> EpisodeInputs:
    """Reads everything that ``config`` names.

    Raises:
        ConfigError, BatchError: a file or folder that is missing or cannot be used, an environment that cannot be loaded,
            or a chat template with which the run must say what it wants.
    """
    name = type(config).__name__
    require_experts(f"{name}.router_replay", config.router_replay, config.model)
    tokenizer = load_tokenizer(config.model)
    require_known_end(f"{name}.model", config.model, tokenizer)
    ends = (*stop_token_ids(config.model, tokenizer), *_template_end(tokenizer, config))
    rows = open_dataset(config.dataset)
    if len(rows) < config.prompts_per_step:
        problem = f"{config.dataset} has {len(rows)} rows; use at most that"
        raise ConfigError.of(f"{name}.prompts_per_step", config.prompts_per_step, problem)
    held_out = [
        HeldOutSet.of(each, set_name, open_dataset(each.path, held_out=True), config.eval_sampling[set_name])
        for set_name, each in config.eval_sets.items()
    ]
    score = None if config.score is None else load_score(config.score)
    player, notes = load_episode_player(config, tokenizer, rows[0], ends)
    batches = endless_batches(rows, config.prompts_per_step, config.seed)
    return EpisodeInputs(tokenizer, player, score, rows, held_out, batches, ends, notes)


def load_episode_player(
    config: EpisodeConfig, tokenizer: Any, row: Row, stop_token_ids: Sequence[int]
) -> tuple[Player, tuple[str, ...]]:
    """The player, and how it uses the chat template, which is checked with the environment of ``row``.

    Raises:
        ConfigError: see :func:`load_episode_inputs`.
    """
    if config.player is not None:
        return load_player(config.player), ()
    assert config.environment is not None  # see EpisodeConfig
    options = StepOptions(
        chat_template_kwargs=config.data.chat_template_kwargs,
        history=config.history,
        other_end=config.other_end,
        stop_token_ids=(*config.sampling.stop_token_ids, *stop_token_ids),
        tool_format=config.tool_format,
        on_cut=config.on_cut,
        limits=filled(config, "limits"),
    )
    player = SteppedPlayer(load_environment(config.environment), tokenizer, options)
    found = run_episodes(_checked(player, row, config))
    changes = "; ".join(found.check.changes) if found is not None else ""
    return player, (f"history {found.history}: the chat template changes {changes}",) if found and changes else ()


def _template_end(tokenizer: Any, config: EpisodeConfig) -> list[int]:
    """What ends an answer to a question by the chat template; nothing where there is none, or none that can be used."""
    if not tokenizer.chat_template:
        return []
    question = [{"role": "user", "content": "x"}]
    try:
        end = turn_end(question, tokenizer, chat_template_kwargs=config.data.chat_template_kwargs)
    except BatchError:  # an environment is told when it is checked, and a player may do without
        return []
    return [] if end is None else [end]


async def _checked(player: SteppedPlayer, row: Row, config: EpisodeConfig) -> ChatFormat | None:
    try:
        return await player.check(row)
    except RLBackendError:
        raise
    except Exception as error:  # what the environment of a user raises
        problem = f"cannot be made of the first row of {config.dataset}: {what_it_raised(error)}"
        raise ConfigError.of("environment", config.environment, problem) from error
