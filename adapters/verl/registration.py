"""Registration of the engine that verl builds for ``strategy=megatron``: ours or its own."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from adapters.verl.late_imports import when_imported
from rl_backend.contracts import RegistryError, UnsupportedError

VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"
VENDORS = {"rl_backend": "native", "rl_backend_bridge": "bridge"}
"""Value of ``VERL_ENGINE_VENDOR`` -> backend for verl's own configuration class, which has no field for it."""

MODEL_TYPES = ("language_model", "value_model")
"""verl's model types that have an engine here."""

type ChooseEngine = Callable[[str, Any, str | None], tuple[type, Any]]
"""(verl's model type, configuration, backend for verl's own class) -> the engine's class and its configuration:
:func:`adapters.verl.engine_config.choose_engine`, which only a process that builds an engine imports."""

_STRATEGY = "megatron"
_DEVICES = ("cpu", "cuda")
_REGISTRY_MODULE = "verl.workers.engine.base"
_CONFIG_MODULE = "adapters.verl.engine_config."


def register_vendors(choose: ChooseEngine) -> None:
    """Makes ``VERL_ENGINE_VENDOR`` accept the names in :data:`VENDORS`; without one of them verl chooses as before."""
    # Not now: its import takes seconds, and most processes that import verl (rollout servers, reward workers) need it never.
    when_imported(_REGISTRY_MODULE, lambda base: _register_vendors(base, choose))


def register_config_class(choose: ChooseEngine) -> None:
    """Makes verl build our engines from an ``RLBackendEngineConfig``, and its own from its own class."""
    when_imported(_REGISTRY_MODULE, lambda base: _register_config_class(base, choose))


def is_ours(role: Any) -> bool:
    if role.get("strategy") != _STRATEGY:
        return False
    target = str(role.megatron.get("_target_"))
    return target.startswith(_CONFIG_MODULE) or os.environ.get(VENDOR_VARIABLE) in VENDORS


def _register_vendors(base: ModuleType, choose: ChooseEngine) -> None:
    for vendor, backend in VENDORS.items():
        for device in _DEVICES:
            _register(base, device, vendor, backend, choose)


def _register_config_class(base: ModuleType, choose: ChooseEngine) -> None:
    # verl looks here first, before what is registered for the device alone.
    device = os.getenv("VERL_ENGINE_DEVICE") or base.get_device_name()
    vendor = os.getenv(VENDOR_VARIABLE) or base.get_vendor()
    if device not in _DEVICES:
        raise UnsupportedError(
            f"RLBackendEngineConfig on the device {device!r}: the runtimes are for {' and '.join(_DEVICES)}", device=device
        )
    _register_vendors(base, choose)
    if vendor not in VENDORS:
        _register(base, device, vendor, None, choose)


def _register(base: ModuleType, device: str, vendor: str, backend: str | None, choose: ChooseEngine) -> None:
    for model_type in MODEL_TYPES:
        known = base.EngineRegistry._engines.get(model_type, {}).get(_STRATEGY, {}).get((device, vendor))
        if known is not None:
            if getattr(known, "rl_backend_chooses", False):
                continue
            raise RegistryError(
                f"verl's registry has {known.__module__}.{known.__qualname__} for {model_type}, {_STRATEGY}, {device}, "
                f"{vendor}, and would build it whatever the configuration's class; set {VENDOR_VARIABLE} to "
                f"{' or '.join(VENDORS)}, or do not load that package",
                model_type=model_type,
                vendor=vendor,
            )
        base.EngineRegistry.register(model_type, _STRATEGY, device, vendor)(_chooser(base, model_type, backend, choose))


def _chooser(base: ModuleType, model_type: str, backend: str | None, choose: ChooseEngine) -> type:
    class ChosenEngine(base.BaseEngine):  # type: ignore[name-defined]
        rl_backend_chooses = True
        backend_for_verls_class = backend

        def __new__(cls, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> Any:
            engine, config = choose(model_type, engine_config, backend)
            return engine(model_config, config, optimizer_config, checkpoint_config)

    return ChosenEngine
