"""Lengths of an engine's sequences, within the positions of its model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from actors.rollout.config import RolloutConfig
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import CheckpointError, ConfigError
from rl_backend.model import model_positions


def positions_of(model: str, family: str = "auto") -> int | None:
    """The longest sequence of the model in a directory, in tokens; None where nothing limits it, or it is not here.

    Args:
        family: name of a model family, or ``auto``.
    """
    try:
        return model_positions(read_hf_config(model), family)
    except CheckpointError:
        return None


def within_model(config: RolloutConfig) -> RolloutConfig:
    """``config`` with a default ``max_model_len`` that is not more than its model has.

    Raises:
        ConfigError: ``max_model_len`` is another value, and more than the model has.
    """
    positions = positions_of(config.model_path)
    if positions is None or config.max_model_len <= positions:
        return config
    if config.is_set("max_model_len"):
        raise ConfigError.of("RolloutConfig.max_model_len", config.max_model_len, more_than(config.model_path, positions))
    return config.replace(max_model_len=positions)


def fitting_lengths(asked: Mapping[str, int], left: Collection[str], positions: int) -> dict[str, int]:
    """What the lengths in ``left`` can be, so that all of ``asked`` fit together; empty where they do, or never will.

    Args:
        asked: option -> tokens.
        left: options that nobody gave; none gets more than what it asks for.
        positions: of the model.
    """
    room = positions - sum(tokens for option, tokens in asked.items() if option not in left)
    if room < len(left) or sum(asked.values()) <= positions:
        return {}
    fitting: dict[str, int] = {}
    for number, option in enumerate(sorted(left, key=lambda option: asked[option])):
        fitting[option] = min(asked[option], room // (len(left) - number))
        room -= fitting[option]
    return fitting


def more_than(model: str, positions: int) -> str:
    """What is said of a length that is too long."""
    return f"{model} has {positions} positions for prompt and response together; use at most {positions}"
