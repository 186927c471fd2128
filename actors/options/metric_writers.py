"""Names of metric writers: the option ``metrics_to``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from typing import Any

from rl_backend.contracts import ConfigError

BUILT_IN = ("tensorboard", "wandb", "mlflow", "trackio")
"""Names, which are also those of the packages that the writers need."""


def writer_names(names: str | None) -> list[str]:
    """The writers that ``names``, with commas between them, asks for; ``none`` asks for none.

    Raises:
        ConfigError: an unknown name, a package that is not installed, or a class that cannot be imported.
    """
    wanted = list(dict.fromkeys(name for part in (names or "").split(",") if (name := part.strip())))
    if wanted == ["none"]:
        return []
    for name in wanted:
        if name not in BUILT_IN:
            import_writer(name)
        elif importlib.util.find_spec(name) is None:
            problem = f"{name} is not installed: pip install {name}, or {instead_of(wanted)}"
            raise ConfigError.of("metrics_to", name, problem)
    return wanted


def import_writer(name: str) -> Any:
    """The class that ``package.module:Class`` names.

    Raises:
        ConfigError: it cannot be imported.
    """
    known = ", ".join(BUILT_IN)
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ConfigError.of("metrics_to", name, f"is none of {known}; a writer of your own is package.module:Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"cannot be imported ({error}); give package.module:Class, or one of {known}"
        raise ConfigError.of("metrics_to", name, problem) from None


def instead_of(names: Collection[str]) -> str:
    """What to do without one of ``names``."""
    return "leave it out" if len(names) > 1 else "give none"
