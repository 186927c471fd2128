"""Facts about this machine that decide what it can run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

GIB = 2**30
NVIDIA_SMI_SECONDS = 60


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device as the driver lists it; memory in GiB."""

    name: str
    memory_gib: float


@dataclass(frozen=True)
class Machine:
    """Sizes are in GiB, ``cores`` counts what this process may use, ``cpu_features`` are names from /proc/cpuinfo."""

    python: str
    executable: str
    system: str
    architecture: str
    cores: float
    cpu_features: tuple[str, ...]
    memory_gib: float
    free_memory_gib: float
    shared_memory_gib: float | None
    free_disk_gib: float
    compiler: str | None
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = field(default=None)


def read_machine() -> Machine:
    """The machine this process runs on, within the limits of its container."""
    total, available = _memory()
    gpus, driver = _gpus()
    return Machine(
        python=platform.python_version(),
        executable=sys.executable,
        system=platform.system(),
        architecture=platform.machine(),
        cores=_cores(),
        cpu_features=_cpu_features(),
        memory_gib=total / GIB,
        free_memory_gib=available / GIB,
        shared_memory_gib=shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").is_dir() else None,
        free_disk_gib=shutil.disk_usage(Path.cwd()).free / GIB,
        compiler=next((path for name in (os.environ.get("CXX") or "g++", "clang++") if (path := shutil.which(name))), None),
        gpus=gpus,
        driver=driver,
    )


def _cores() -> float:
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota, period = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, int(quota) / int(period))
    return cores


def _memory() -> tuple[int, int]:
    """Total and available bytes, the smaller of the machine's and the container's."""
    table = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    total = int(table.get("MemTotal", "0 kB").split()[0]) * 1024
    available = int(table.get("MemAvailable", "0 kB").split()[0]) * 1024
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        allowed = _read(limit)
        if allowed.isdigit() and int(allowed) < total:
            total = int(allowed)
            available = min(available, total - int(_read(usage) or 0))
    return total, available


def _cpu_features() -> tuple[str, ...]:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(set(value.split()) & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd"}))
    return ()


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    if not shutil.which("nvidia-smi"):
        return (), None
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi does not answer within {NVIDIA_SMI_SECONDS} s"
    if listing.returncode != 0:
        said = (listing.stdout + listing.stderr).strip() or "no output"
        return (), f"nvidia-smi fails: {said.splitlines()[0]}"
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.stdout.splitlines() if line.count(",") == 2]
    gpus = tuple(Gpu(name, float(memory) / 1024 if memory.isdigit() else 0.0) for name, memory, _ in rows)
    return gpus, rows[0][2] if rows else None


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text().strip() if file.is_file() and os.access(file, os.R_OK) else ""
