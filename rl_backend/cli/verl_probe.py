"""Which engine verl would build in this environment, and whether it finds this package: ``rl-backend doctor --verl``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from rl_backend.cli.probes import run_probe

VERL_SECONDS = 180
_VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"
_PLUGINS_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"
_TARGET = "adapters.verl.engine_config.RLBackendEngineConfig"

# verl itself swallows what an entry point raises.
VERL_SCRIPT = """
import importlib, importlib.metadata, json, os, sys
found = {"error": None, "load_error": None, "override_error": None, "engines": {}}
found["installed"] = bool(importlib.metadata.entry_points(group="verl.plugins", name="rl_backend"))
for name in ("VERL_ENGINE_VENDOR", "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES"):
    found[name.lower()] = os.environ.get(name)
import verl
found["version"] = verl.__version__
found["loaded"] = "adapters.verl.plugin" in sys.modules
if not found["loaded"]:
    try:
        importlib.import_module("adapters.verl.plugin")
    except Exception as error:
        found["load_error"] = f"{type(error).__name__}: {error}"
    found["engines"] = dict.fromkeys(("language_model", "value_model"), "of verl")
else:
    from verl.workers.engine import EngineRegistry
    for model in ("language_model", "value_model"):
        try:
            engine = EngineRegistry.get_engine_cls(model, "megatron")
            found["engines"][model] = getattr(engine, "backend_for_verls_class", None) or "of verl"
        except ValueError:
            found["engines"][model] = "none of verl's own on this device"
try:
    importlib.import_module("adapters.verl.engine_config")
except Exception as error:
    found["override_error"] = f"{type(error).__name__}: {error}"
from verl.utils.device import get_device_name
found["device"] = get_device_name()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class VerlProbe:
    """What verl does here.

    Attributes:
        error: None when verl imports.
        installed: whether this package's entry point for verl is.
        loaded: whether verl loaded it.
        load_error: what it raises, where verl did not load it; None when nothing.
        override_error: what the configuration class that ``_target_`` names raises on import; None when nothing.
        engines: verl's model type -> backend of our engine, ``of verl``, or why there is none; for ``strategy=megatron`` and
            verl's own configuration class.
        device: what verl trains on.
    """

    error: str | None
    version: str = ""
    installed: bool = False
    loaded: bool = False
    load_error: str | None = None
    override_error: str | None = None
    engines: dict[str, str] | None = None
    device: str = ""
    verl_engine_vendor: str | None = None
    verl_use_external_plugins: str | None = None
    verl_use_external_modules: str | None = None


def probe_verl() -> VerlProbe:
    """Imports verl in a process of its own and asks its registry."""
    output, error = run_probe([sys.executable, "-W", "ignore", "-c", VERL_SCRIPT], VERL_SECONDS)
    return VerlProbe(error) if error is not None else VerlProbe(**json.loads(output.splitlines()[-1]))


def verl_lines(probe: VerlProbe) -> list[str]:
    """The report's section on verl."""
    if probe.error is not None:
        return [f"does not import: {probe.error}"]
    return [
        f"version        {probe.version}, on the device {probe.device}",
        f"entry point    {_entry_point(probe)}",
        f"_target_={_TARGET}: {probe.override_error or "rl_backend's engine"}",
        *(f"{model:15}{_engine(probe, engine)}" for model, engine in (probe.engines or {}).items()),
    ]


def verl_problems(probe: VerlProbe) -> list[str]:
    """What is broken: verl itself, or an engine that was asked for and would not be built."""
    if probe.error is not None:
        return [f"verl does not import: {probe.error}"]
    asked, vendors = probe.verl_engine_vendor, _vendors()
    if asked in vendors and any(engine != vendors[asked] for engine in (probe.engines or {}).values()):
        return [f"{_VENDOR_VARIABLE}={asked} is set and verl would build its own engine: {_entry_point(probe)}"]
    return []


def _entry_point(probe: VerlProbe) -> str:
    if probe.loaded and not probe.installed:
        return f"not installed; loaded by VERL_USE_EXTERNAL_MODULES={probe.verl_use_external_modules}"
    if probe.loaded:
        return "installed, and verl loads it"
    if probe.load_error is not None:
        return f"does not load, which verl does not say: {probe.load_error}"
    if probe.installed:
        return f"installed, and left out by {_PLUGINS_VARIABLE}={probe.verl_use_external_plugins}; name rl_backend there"
    return "not installed: pip install rl-backend, or set VERL_USE_EXTERNAL_MODULES=adapters.verl.plugin"


def _engine(probe: VerlProbe, engine: str) -> str:
    asked, vendors = probe.verl_engine_vendor, _vendors()
    vendor = f"with {_VENDOR_VARIABLE}={asked}" if asked else f"without {_VENDOR_VARIABLE}"
    if engine in vendors.values():
        return f"rl_backend's, backend {engine}, {vendor}"
    choice = "" if asked in vendors else f"; {' or '.join(vendors)} chooses rl_backend's"
    return f"{"verl's own" if engine == 'of verl' else engine} {vendor}{choice}"


def _vendors() -> dict[str, str]:
    # Doctor itself must run where torch does not import.
    from adapters.verl.registration import VENDORS

    return VENDORS
