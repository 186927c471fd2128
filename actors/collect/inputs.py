"""Inputs of a run that samples: tokenizer, prompts and reward functions, or rows and environment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from actors.cluster.ray_watch import cluster_loss
from actors.cluster.session import raise_if_terminated
from actors.collect.held_out import HeldOutSet, load_held_out
from actors.collect.stop_tokens import Ends, stop_token_ids, template_end
from actors.options.config import with_local_model
from actors.options.sampled_config import EpisodeConfig, RLConfig
from actors.rollout.config import SamplingConfig
from actors.train.model import require_experts, require_known_end
from rl_backend.contracts import ConfigError, RLBackendError
from rl_backend.data.examples import DataConfig, Examples, open_dataset
from rl_backend.data.prompts import Prompt, endless_batches, load_prompts, load_tokenizer
from rl_backend.data.rewards import RewardConfig, RewardScorer
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.environment.conversation import ChatFormat
from rl_backend.environment.playing import run_episodes
from rl_backend.environment.protocol import Player, Score, load_environment, load_player, load_score
from rl_backend.environment.stepping import StepOptions, SteppedPlayer
from rl_backend.options.option_set import filled

type Row = Mapping[str, Any]


@dataclass(frozen=True)
class Inputs:
    """Tokenizer, reward functions, prompts, batches of these, and how to sample; ``notes`` are for the run's first line."""

    tokenizer: Any
    reward: RewardScorer
    prompts: Sequence[Prompt]
    held_out: Sequence[HeldOutSet]
    batches: Iterator[list[Prompt]]
    sampling: SamplingConfig
    notes: tuple[str, ...] = ()


def load_inputs(config: RLConfig, taken: int = 0) -> Inputs:
    """Reads everything that ``config`` names; raises ConfigError or BatchError for what is missing or cannot be used.

    ``taken`` is the number of batches that earlier steps have taken.
    """
    tokenizer = _load_tokenizer(config)
    reward = load_scorer(config.rewards)
    load, new_ends = loaders(config.model, tokenizer, reward, config.data, config.max_prompt_tokens)
    ends = new_ends()
    prompts = load(config.dataset, see=ends.see)
    held_out = load_held_out(config.eval_sets, config.eval_sampling, load, new_ends)
    _require_rows(config, len(prompts), "prompts")
    return Inputs(
        tokenizer=tokenizer,
        reward=reward,
        prompts=prompts,
        held_out=held_out,
        batches=endless_batches(prompts, config.prompts_per_step, config.seed, start=taken),
        sampling=ends.added_to(config.sampling),
        notes=tuple(note for note in (prompts.note, *(each.note for each in held_out)) if note),
    )


def loaders(
    model: str, tokenizer: Any, reward: RewardScorer, data: DataConfig, max_prompt_tokens: int
) -> tuple[Callable[..., Examples[Prompt]], Callable[[], Ends]]:
    """What reads a data set with all that the reward functions need, and what makes the stop tokens of its answers."""
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=max_prompt_tokens,
        data=data,
        require_answer=reward.needs_ground_truth,
        require_columns=reward.columns,
    )
    return load, partial(Ends, model, tokenizer, data)


def load_scorer(config: RewardConfig) -> RewardScorer:
    """The reward functions of a run, which must not outlast a SIGTERM or the loss of Ray that they catch."""
    return config.load(check=_raise_what_was_caught)


def _raise_what_was_caught() -> None:
    # A reward function that catches everything has caught these too; the run must end all the same.
    raise_if_terminated()
    if (loss := cluster_loss()) is not None:
        raise loss


@dataclass(frozen=True)
class EpisodeInputs:
    """Tokenizer, player and rows.

    Attributes:
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


def load_episode_inputs(config: EpisodeConfig, taken: int = 0, *, trains: bool = True) -> EpisodeInputs:
    """As :func:`load_inputs`. For a run that does not train there may be fewer rows than a step takes."""
    tokenizer = _load_tokenizer(config)
    of_answers = template_end(tokenizer, config.data)
    ends = (*stop_token_ids(config.model, tokenizer), *(() if of_answers is None else (of_answers,)))
    rows = open_dataset(config.dataset)
    if trains:
        _require_rows(config, len(rows), "rows")
    held_out = [
        HeldOutSet.of(each, set_name, open_dataset(each.path, held_out=True), config.eval_sampling[set_name])
        for set_name, each in config.eval_sets.items()
    ]
    score = None if config.score is None else load_score(config.score)
    player, notes = load_episode_player(config, tokenizer, rows[0], ends)
    batches = endless_batches(rows, config.prompts_per_step if trains else 1, config.seed, start=taken)
    return EpisodeInputs(tokenizer, player, score, rows, held_out, batches, ends, notes)


def load_episode_player(
    config: EpisodeConfig, tokenizer: Any, row: Row, stop_token_ids: Sequence[int]
) -> tuple[Player, tuple[str, ...]]:
    """The player, and how it uses the chat template, which is checked with the environment of ``row``."""
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


def _load_tokenizer(config: RLConfig | EpisodeConfig) -> Any:
    """The model's tokenizer, after checking that the model fits it, and the routes that are replayed."""
    name, model = type(config).__name__, with_local_model(config).model
    require_experts(f"{name}.router_replay", config.router_replay, model)
    tokenizer = load_tokenizer(model)
    require_known_end(f"{name}.model", model, tokenizer)
    return tokenizer


def _require_rows(config: RLConfig | EpisodeConfig, number: int, what: str) -> None:
    if number < config.prompts_per_step:
        problem = f"{config.dataset} has {number} {what}; use at most that"
        raise ConfigError.of(f"{type(config).__name__}.prompts_per_step", config.prompts_per_step, problem)


async def _checked(player: SteppedPlayer, row: Row, config: EpisodeConfig) -> ChatFormat | None:
    try:
        return await player.check(row)
    except RLBackendError:
        raise
    except Exception as error:  # what the environment of a user raises
        problem = f"cannot be made of the first row of {config.dataset}: {what_it_raised(error)}"
        raise ConfigError.of("environment", config.environment, problem) from error
