"""Inputs of an episode run: tokenizer, environment, rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actors.run.ends import stop_token_ids
from actors.run.episode_config import EpisodeConfig
from actors.run.episode_stream import Row
from actors.run.eval_sets import HeldOutSet
from actors.train.model import require_experts, require_known_end
from rl_backend.contracts import BatchError, ConfigError, RLBackendError
from rl_backend.data.chat import turn_end
from rl_backend.data.examples import open_dataset
from rl_backend.data.prompts import endless_batches, load_tokenizer
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.environment.conversation import ChatFormat
from rl_backend.environment.loading import load_environment, load_player, load_score
from rl_backend.environment.playing import run_episodes
from rl_backend.environment.protocol import Player, Score
from rl_backend.environment.stepping import StepOptions, SteppedPlayer


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
        HeldOutSet(
            set_name,
            open_dataset(each.path, held_out=True),
            config.eval_sampling[set_name],
            tuple(dict.fromkeys((1, config.eval_sampling[set_name].n))) if each.pass_at is None else each.pass_at,
            1.0 if each.pass_threshold is None else each.pass_threshold,
        )
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
        limits=config.filled("limits"),
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
