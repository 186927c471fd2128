"""Tries torch, Ray and Megatron in processes of their own, so that a broken installation is a result and not a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TORCH_SECONDS = 180
RAY_SECONDS = 120
MEGATRON_SECONDS = 180

TORCH_SCRIPT = """
import json, torch
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda_build": torch.version.cuda, "devices": devices}))
"""

RAY_SCRIPT = """
import sys, ray
ray.init(
    address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=sys.argv[1]
)
assert ray.get(ray.remote(lambda: 41 + 1).remote()) == 42
ray.shutdown()
"""

MEGATRON_SCRIPT = """
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


@dataclass(frozen=True)
class TorchProbe:
    """``error`` is None when torch imports; ``devices`` are the names of the GPUs that it can use."""

    error: str | None
    version: str = ""
    cuda_build: str | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class RayProbe:
    """``error`` is None when a local Ray cluster started and ran a task."""

    error: str | None


@dataclass(frozen=True)
class MegatronProbe:
    """``error`` is None when the bridge runtime can import Megatron; ``transformer_engine``: its version, if it is there."""

    error: str | None
    transformer_engine: str | None = None


def probe_torch() -> TorchProbe:
    """Imports torch and asks it for GPUs."""
    output, error = run_probe([sys.executable, "-c", TORCH_SCRIPT], TORCH_SECONDS)
    if error is not None:
        return TorchProbe(error)
    found = json.loads(output.splitlines()[-1])
    return TorchProbe(None, found["version"], found["cuda_build"], tuple(found["devices"]))


def probe_ray() -> RayProbe:
    """Starts a local Ray cluster of one core, runs a task in it and stops it."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        _, error = run_probe([sys.executable, "-c", RAY_SCRIPT, folder], RAY_SECONDS)
    return RayProbe(error)


def probe_megatron() -> MegatronProbe:
    """Imports Megatron-Core and Megatron-Bridge as the bridge runtime does."""
    output, error = run_probe([sys.executable, "-c", MEGATRON_SCRIPT], MEGATRON_SECONDS)
    return MegatronProbe(error) if error is not None else MegatronProbe(**json.loads(output.splitlines()[-1]))


def ray_authentication() -> str:
    """Whether Ray's token authentication will be on, in words."""
    mode = os.environ.get("RAY_AUTH_MODE")
    token = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), None)
    if token is None and (Path.home() / ".ray" / "auth_token").is_file():
        token = "~/.ray/auth_token"
    held = f"a token is in {token}" if token else "there is no token yet"
    if mode is None:
        return f"RAY_AUTH_MODE is not set, {held}; Ray decides: a new local cluster makes a token and asks for it"
    return f"RAY_AUTH_MODE={mode}, {held}"


def run_probe(command: list[str], seconds: float) -> tuple[str, str | None]:
    """Runs a command. Returns its standard output, and what went wrong in one line or None."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {seconds:.0f} s"
    if result.returncode == 0:
        return result.stdout, None
    lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    return "", lines[-1].strip()[:300] if lines else f"the process ended with status {result.returncode}"
