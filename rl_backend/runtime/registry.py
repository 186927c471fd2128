"""Runtimes by name."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_backend.checkpoint.hf_reader import require_float_weights
from rl_backend.checkpoint.hf_weights import require_same_head
from rl_backend.contracts import BACKEND_CONFIGS, BackendConfig, Head, Registry, RuntimeConfig
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.interface import Runtime

type RuntimeFactory = Callable[[RuntimeConfig], Runtime[Any]]

_FACTORIES: Registry[RuntimeFactory] = Registry("runtime", "register_runtime(...)")
_CHECKS: dict[str, Callable[[RuntimeConfig], None]] = {}


def register_runtime(
    name: str,
    config_type: type[BackendConfig],
    factory: RuntimeFactory,
    check: Callable[[RuntimeConfig], None] | None = None,
) -> None:
    """Makes ``RuntimeConfig(backend=name)`` work.

    Args:
        name: the value of ``RuntimeConfig.backend``.
        config_type: type of ``RuntimeConfig.backend_cfg`` for it.
        factory: makes the :class:`~rl_backend.runtime.interface.Runtime`.
        check: raises for a model directory, which exists, that the runtime cannot lay out as the configuration says. It runs
            before any rank is started.

    Raises:
        RegistryError: the name is taken by something else.
    """
    BACKEND_CONFIGS.add(name, config_type)
    _FACTORIES.add(name, factory)
    if check is not None:
        _CHECKS[name] = check


def check_config(config: RuntimeConfig, num_ranks: int) -> None:
    """Refuses what cannot work on ``num_ranks`` ranks, without building anything.

    The model is checked where its directory exists in this process; every rank checks it again when it builds it.

    Raises:
        ConfigError: the number of ranks does not fit the layout, or the layout does not fit the model.
        UnsupportedError: the model, or a feature that its configuration asks for.
    """
    config.backend_cfg.parallel.data_parallel_size(num_ranks)
    check = _CHECKS.get(config.backend)
    if check is not None and Path(config.hf_path).is_dir():
        check(config)


def check_weights(config: RuntimeConfig, head: Head = "log_probs") -> None:
    """Refuses a model directory whose weights cannot be loaded, by the headers of its files.

    Raises:
        CheckpointError: weight files that are missing or damaged or, of the native runtime, tensors that are missing,
            surplus or of another shape; or a head that differs from the embeddings that it should be tied to.
        UnsupportedError: weights that are quantised, or a model or head that the native runtime does not have.
    """
    require_float_weights(config.hf_path)
    if config.backend == "native":
        importlib.import_module("rl_backend.runtime.native.layout").check_weights(config, head)
    if head == "log_probs":
        require_same_head(config.hf_path)


def create_runtime(config: RuntimeConfig) -> Runtime[Any]:
    """The runtime that ``config`` describes, for this rank.

    Uses the process group that is initialised, or else makes one from ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``; without them, a group of this process alone.
    """
    return _FACTORIES.get(config.backend)(config)


def _imported(module: str, name: str) -> Callable[[RuntimeConfig], Any]:
    # A runtime that is not used costs nothing.
    return lambda config: getattr(importlib.import_module(f"rl_backend.runtime.{module}"), name)(config)


_FACTORIES.add("native", _imported("native.engine", "native_runtime"))
_CHECKS["native"] = _imported("native.layout", "check_config")
_FACTORIES.add("bridge", _imported("bridge.engine.engine", "bridge_runtime"))
_CHECKS["bridge"] = _imported("bridge.checks", "check_config")
BACKEND_CONFIGS.add("bridge", BridgeConfig)
