"""Whether a model fits a layout, before anything is made or loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.model import ModelFamily


def check_model_layout(family: ModelFamily, architecture: Any, parallel: ParallelConfig) -> None:
    """Raises :class:`ConfigError` for a layout that the family does not have, or whose sizes do not divide the model."""
    if family.check_layout is not None:
        family.check_layout(architecture, parallel)
        return
    sizes: Mapping[str, int] = parallel.model_dump()
    for name, size in sizes.items():
        if size != 1:
            raise ConfigError.of(
                f"ParallelConfig.{name}",
                size,
                f"model family {family.name!r} has data parallelism only; use 1, or add ModelFamily.check_layout and lay it "
                "out in parallelize",
            )
