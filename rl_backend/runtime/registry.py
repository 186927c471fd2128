"""Runtimes by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rl_backend.contracts import BACKEND_CONFIGS, BackendConfig, Registry, RuntimeConfig
from rl_backend.runtime.base import Runtime

type RuntimeFactory = Callable[[RuntimeConfig], Runtime[Any]]

_FACTORIES: Registry[RuntimeFactory] = Registry("runtime", "register_runtime(...)")


def register_runtime(name: str, config_type: type[BackendConfig], factory: RuntimeFactory) -> None:
    """Makes ``RuntimeConfig(backend=name)`` work.

    Args:
        name: the value of ``RuntimeConfig.backend``.
        config_type: type of ``RuntimeConfig.backend_cfg`` for it.
        factory: usually the :class:`~rl_backend.runtime.base.Runtime` subclass.

    Raises:
        RegistryError: the name is taken by something else.
    """
    BACKEND_CONFIGS.add(name, config_type)
    _FACTORIES.add(name, factory)


def create_runtime(config: RuntimeConfig) -> Runtime[Any]:
    """The runtime that ``config`` describes, for this rank.

    Uses the process group that is initialised, or else makes one from ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``; without them, a group of this process alone.
    """
    return _FACTORIES.get(config.backend)(config)


def _native(config: RuntimeConfig) -> Runtime[Any]:
    return importlib.import_module("rl_backend.runtime.native").NativeRuntime(config)  # type: ignore[no-any-return]


def _bridge(config: RuntimeConfig) -> Runtime[Any]:
    return importlib.import_module("rl_backend.runtime.bridge").BridgeRuntime(config)  # type: ignore[no-any-return]


_FACTORIES.add("native", _native)
_FACTORIES.add("bridge", _bridge)
