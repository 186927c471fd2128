"""Registration of the engine that verl builds for ``strategy=megatron``: ours or its own."""

import importlib
import os
from types import ModuleType
from typing import Any

from adapters.verl.late_imports import when_imported
from rl_backend.contracts import RegistryError, UnsupportedError

VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"
VENDORS = {"rl_backend": "native", "rl_backend_bridge": "bridge"}
"""Value of ``VERL_ENGINE_VENDOR`` -> backend for verl's own configuration class, which has no field for it."""

MODEL_TYPES = ("language_model", "value_model")
"""verl's model types that have an engine here."""

_STRATEGY = "megatron"
_DEVICES = ("cpu", "cuda")
_REGISTRY_MODULE = "verl.workers.engine.base"
_CONFIG_MODULE = "adapters.verl.engine_config"


def register_vendors() -> None:
    """Makes ``VERL_ENGINE_VENDOR`` accept the names in :data:`VENDORS`; without one of them verl chooses as before."""
    # Not now: its import takes seconds, and most processes that import verl (rollout servers, reward workers) need it never.
    when_imported(_REGISTRY_MODULE, _register_vendors)


def register_config_class() -> None:
    """Makes verl build our engines from an ``RLBackendEngineConfig``, and its own from its own class."""
    when_imported(_REGISTRY_MODULE, _register_config_class)


def is_ours(role: Any) -> bool:
    if role.get("strategy") != _STRATEGY:
        return False
    target = str(role.megatron.get("_target_"))
    return target.startswith(f"{_CONFIG_MODULE}.") or os.environ.get(VENDOR_VARIABLE) in VENDORS


def _register_vendors(base: ModuleType) -> None:
    for vendor, backend in VENDORS.items():
        for device in _DEVICES:
            _register(base, device, vendor, backend)


def _register_config_class(base: ModuleType) -> None:
    # verl looks here first, before what is registered for the device alone.
    device = os.getenv("VERL_ENGINE_DEVICE") or base.get_device_name()
    vendor = os.getenv(VENDOR_VARIABLE) or base.get_vendor()
    if device not in _DEVICES:
        raise UnsupportedError(
            f"RLBackendEngineConfig on the device {device!r}: the runtimes are for {' and '.join(_DEVICES)}", device=device
        )
    _register_vendors(base)
    if vendor not in VENDORS:
        _register(base, device, vendor, None)


def _register(base: ModuleType, device: str, vendor: str, backend: str | None) -> None:
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
        base.EngineRegistry.register(model_type, _STRATEGY, device, vendor)(_chooser(base, model_type, backend))


def _chooser(base: ModuleType, model_type: str, backend: str | None) -> type:
    class ChosenEngine(base.BaseEngine):  # type: ignore[name-defined]
        rl_backend_chooses = True
        backend_for_verls_class = backend

        def __new__(cls, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> Any:
            # By its name, and only where an engine is built: it imports verl's configurations and engines, and this module.
            choices = importlib.import_module(_CONFIG_MODULE)
            engine, config = choices.choose_engine(model_type, engine_config, backend)
            return engine(model_config, config, optimizer_config, checkpoint_config)

    return ChosenEngine
