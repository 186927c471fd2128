"""What ``build_model`` was asked for; the same for every runtime."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from rl_backend.contracts import ConfigError, Head, OptimizerConfig, RuntimeConfig


def handle_config(
    config: RuntimeConfig,
    hf_path: Path | str | None,
    optimizer: OptimizerConfig | None,
    head: Head,
    *,
    forward_only: bool,
) -> RuntimeConfig:
    """The runtime's configuration as it is for one model.

    Raises:
        ConfigError: an optimizer for a forward-only model, or a head that does not exist.
    """
    if head not in get_args(Head.__value__):
        raise ConfigError.of("head", head, f"expected one of {', '.join(map(repr, get_args(Head.__value__)))}")
    if optimizer is not None and forward_only:
        raise ConfigError.of("optimizer", optimizer, "a forward-only model has none; leave one of the two out")
    if hf_path is not None:
        config = config.replace(hf_path=str(hf_path))
    if optimizer is not None:
        config = config.replace(backend_cfg=config.backend_cfg.replace(optimizer=optimizer))
    return config
