"""Environments with other packages, whose Python Ray starts for an actor."""

import json
import platform
import subprocess

import ray

_SECONDS = 60.0
_ASKED = """
import importlib.metadata, importlib.util, json, platform
try:
    ray = importlib.metadata.version("ray")
except importlib.metadata.PackageNotFoundError:
    ray = ""
print(json.dumps([platform.python_version(), ray, importlib.util.find_spec("vllm") is not None]))
"""


def why_not_for_engines(executable: str) -> str:
    """Why Ray cannot start engines with the Python ``executable`` on this machine, in words; empty where it can."""
    try:
        # Elsewhere than here, where a folder of that name would count as installed.
        told = subprocess.run(
            [executable, "-c", _ASKED], capture_output=True, text=True, timeout=_SECONDS, check=False, cwd="/"
        )
        python, of_ray, has_vllm = json.loads(told.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be run: {error}"
    except (ValueError, TypeError):
        return f"it is not a Python that runs: {(told.stderr.strip() or told.stdout.strip() or 'it says nothing')[-200:]}"
    # Ray's processes speak to each other in a format of its own, and pickle with Python's.
    here = (platform.python_version(), ray.__version__)
    if (python, of_ray) != here:
        found = f"Python {python} and {f'Ray {of_ray}' if of_ray else 'no Ray'}"
        return f"it has {found}; all processes of a cluster need the same, here Python {here[0]} and Ray {here[1]}"
    return "" if has_vllm else "vllm is not installed there, which samples responses"
