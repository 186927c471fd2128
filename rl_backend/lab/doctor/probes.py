"""Probes of torch, Ray, Megatron and verl. Each runs in a new process: a crash there is a result here."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"
# As in adapters.verl.registration, which needs torch.
VENDORS = {"rl_backend": "native", "rl_backend_bridge": "bridge"}


@dataclass(frozen=True)
class Probe:
    """A script that prints these fields as JSON in its last line; ``error`` is None when it found nothing broken."""

    TRIES: ClassVar[str]
    SECONDS: ClassVar[float] = 180
    SCRIPT: ClassVar[str]

    error: str | None

    @classmethod
    def run(cls) -> Self:
        environment = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
        with tempfile.TemporaryDirectory(prefix="probe-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            command = [sys.executable, "-W", "ignore", "-c", cls.SCRIPT, folder]
            try:
                result = subprocess.run(
                    command, capture_output=True, text=True, check=False, timeout=cls.SECONDS, env=environment
                )
            except subprocess.TimeoutExpired:
                return cls(f"no answer within {cls.SECONDS:.0f} s")
        if result.returncode != 0:
            said = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
            return cls(said[-1].strip()[:300] if said else f"the process ended with status {result.returncode}")
        found = json.loads(result.stdout.splitlines()[-1])
        fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in found.items()}
        return cls(**fields)


@dataclass(frozen=True)
class TorchProbe(Probe):
    """Whether torch imports; ``devices`` are the names of the GPUs that it can use.

    Attributes:
        inexact: dtypes in whose products on the CPU rows depend on others; LoRA tenants then equal only to rounding.
    """

    TRIES = "importing torch (about 5 s)"
    SCRIPT = """
import json, logging, torch
from rl_backend.primitive.adapters import rows_are_exact
logging.disable()
dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
inexact = [name for name, dtype in dtypes.items() if not rows_are_exact(dtype, torch.device("cpu"))]
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
found = {"version": torch.__version__, "cuda_build": torch.version.cuda, "devices": devices, "inexact": inexact}
print(json.dumps({"error": None, **found}))
"""

    version: str = ""
    cuda_build: str | None = None
    devices: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()


@dataclass(frozen=True)
class RayProbe(Probe):
    TRIES = "starting Ray here (about 10 s)"
    SECONDS = 120
    SCRIPT = """
import sys, ray
ray.init(
    address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=sys.argv[1]
)
assert ray.get(ray.remote(lambda: 41 + 1).remote()) == 42
ray.shutdown()
print('{"error": null}')
"""


@dataclass(frozen=True)
class MegatronProbe(Probe):
    TRIES = "importing Megatron (about 15 s)"
    SCRIPT = """
import importlib.metadata, json
from rl_backend.contracts import RLBackendError
from rl_backend.runtime.bridge.installed import has_transformer_engine, import_megatron
found = {"error": None, "transformer_engine": None}
try:
    import_megatron()
    if has_transformer_engine():
        found["transformer_engine"] = importlib.metadata.version("transformer-engine")
except RLBackendError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""

    transformer_engine: str | None = None


@dataclass(frozen=True)
class VerlProbe(Probe):
    """Which engine verl would build here, and whether verl finds this package.

    Attributes:
        installed, loaded, load_error: of this package's entry point for verl.
        override_error: the error of importing the configuration class that ``_target_`` names; None without one.
        engines: verl's model type -> backend of our engine, ``of verl``, or why there is none; for ``strategy=megatron`` and
            verl's own configuration class.
        device: what verl trains on.
    """

    # verl itself swallows what an entry point raises.
    TRIES = "asking verl for its engine (about 15 s)"
    SCRIPT = """
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

    @property
    def entry_point(self) -> str:
        if self.loaded and not self.installed:
            return f"not installed; loaded by VERL_USE_EXTERNAL_MODULES={self.verl_use_external_modules}"
        if self.loaded:
            return "installed, and verl loads it"
        if self.load_error is not None:
            return f"does not load, which verl does not say: {self.load_error}"
        if self.installed:
            left_out = f"VERL_USE_EXTERNAL_PLUGINS={self.verl_use_external_plugins}"
            return f"installed, and left out by {left_out}; name rl_backend there"
        return "not installed: pip install rl-backend, or set VERL_USE_EXTERNAL_MODULES=adapters.verl.plugin"

    @property
    def problems(self) -> list[str]:
        if self.error is not None:
            return [f"verl does not import: {self.error}"]
        asked = self.verl_engine_vendor
        if asked in VENDORS and any(engine != VENDORS[asked] for engine in (self.engines or {}).values()):
            return [f"{VENDOR_VARIABLE}={asked} is set and verl would build its own engine: {self.entry_point}"]
        return []


def ray_authentication() -> str:
    mode = os.environ.get("RAY_AUTH_MODE")
    token = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), None)
    if token is None and (Path.home() / ".ray" / "auth_token").is_file():
        token = "~/.ray/auth_token"
    held = f"a token is in {token}" if token else "there is no token yet"
    if mode is None:
        return f"RAY_AUTH_MODE is not set, {held}; Ray decides: a new local cluster makes a token and asks for it"
    return f"RAY_AUTH_MODE={mode}, {held}"
