"""Whether a model fits a layout, before anything is made or loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig, RuntimeConfig
from rl_backend.model import ModelFamily, find_model
from rl_backend.runtime.native.stages import algorithm, model_stages


def check_config(config: RuntimeConfig) -> None:
    """:func:`check_model_layout` of the directory ``config.hf_path``."""
    native = config.options(NativeConfig)
    hf_config = read_hf_config(config.hf_path)
    family = find_model(native.model, hf_config)
    check_model_layout(family, family.parse_config(hf_config), native)


def check_model_layout(family: ModelFamily, architecture: Any, native: NativeConfig) -> None:
    """Raises :class:`ConfigError` for a layout that the family does not have, or whose sizes do not divide the model."""
    algorithm(native)
    if family.check_layout is None:
        _require_one(family, native.parallel, native.parallel.model_dump(), "check_layout")
    else:
        family.check_layout(architecture, native.parallel)
    if family.num_layers is None:
        _require_one(family, native.parallel, ("pp", "vpp"), "num_layers")
        if native.pipeline_schedule != "auto":
            raise ConfigError.of(
                "NativeConfig.pipeline_schedule",
                native.pipeline_schedule,
                f"model family {family.name!r} has no stages; use 'auto', or build them and say so with "
                "ModelFamily.num_layers",
            )
    model_stages(family, architecture, native, pp_rank=0)


def _require_one(family: ModelFamily, parallel: ParallelConfig, names: Iterable[str], missing: str) -> None:
    for name in names:
        size = getattr(parallel, name)
        if size != 1:
            raise ConfigError.of(
                f"ParallelConfig.{name}",
                size,
                f"model family {family.name!r} is not laid out like that; use 1, or do it in its parallelize and build, and "
                f"say so with ModelFamily.{missing}",
            )
