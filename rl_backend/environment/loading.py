"""Environments and players, loaded by name."""

from __future__ import annotations

import inspect
from typing import Any, cast

from rl_backend.contracts import ConfigError
from rl_backend.data.rewards.loading import load_callable
from rl_backend.environment.protocol import MakeEnvironment, Player, Score


def load_environment(spec: str, *, field: str = "environment") -> MakeEnvironment:
    """A class, or a function, that makes the environment of an episode from a row and a seed.

    Args:
        spec: ``package.module:name`` or ``path/file.py:name``.
        field: the option that names it, for messages.

    Raises:
        ConfigError: there is none, or it cannot be called with ``(row, seed)``.
    """
    return cast(MakeEnvironment, _load(spec, field, "row, seed", {}, 0))


def load_player(spec: str, *, field: str = "player") -> Player:
    """A function, or an object, that plays an episode by a loop of its own; arguments and errors as above."""
    return cast(Player, _load(spec, field, "row, sampler", {}, None))


def load_score(spec: str, *, field: str = "score") -> Score:
    """A function that scores the episodes of a group; arguments and errors as above."""
    return cast(Score, _load(spec, field, "episodes", ()))


def _load(spec: str, field: str, takes: str, *arguments: Any) -> Any:
    found = load_callable(spec, field=field)
    try:
        inspect.signature(found).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError.of(field, spec, f"must take ({takes}): {error}") from None
    return found
