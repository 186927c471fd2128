"""Whether a model fits a layout, before anything is made or loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig, RuntimeConfig
from rl_backend.model import ModelFamily, find_model


def check_config(config: RuntimeConfig) -> None:
    """:func:`check_model_layout` of the directory ``config.hf_path``."""
    assert isinstance(config.backend_cfg, NativeConfig), "RuntimeConfig resolves backend_cfg by backend"
    hf_config = read_hf_config(config.hf_path)
    family = find_model(config.backend_cfg.model, hf_config)
    check_model_layout(family, family.parse_config(hf_config), config.backend_cfg.parallel)


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
