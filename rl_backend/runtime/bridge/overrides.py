"""A user's values for fields of Megatron's dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.transformer.enums import AttnBackend

from rl_backend.contracts import ConfigError


def override[T](field: str, config_type: Callable[..., T], overrides: Mapping[str, Any], settings: Mapping[str, Any]) -> T:
    """One of Megatron's dataclasses from this runtime's settings and the user's.

    Raises:
        ConfigError: a field that the dataclass does not have, or values that it refuses.
    """
    names = {each.name for each in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    for name, value in overrides.items():
        if name not in names:
            raise ConfigError.of(f"{field}[{name!r}]", value, f"Megatron's {config_type.__name__} has no such field")
    try:
        return config_type(**{**settings, **overrides})
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"{field}={dict(overrides)!r}: Megatron refuses it: {error}") from error


def attention_backend(name: str) -> AttnBackend:
    """Megatron compares with members of its enumeration only; raises :class:`ConfigError` for a name that none has."""
    if name not in AttnBackend.__members__:
        field = "BridgeConfig.override_transformer_config['attention_backend']"
        raise ConfigError.of(field, name, f"expected one of {', '.join(map(repr, AttnBackend.__members__))}")
    return AttnBackend[name]
