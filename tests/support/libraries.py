"""Libraries whose environments the adapters play: in folders beside ``.venv``, because what they pin is not what we pin.

make libraries, or python -m tests.support.libraries [cookbook] [verifiers], installs them; tests that need one are skipped
without it.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".libraries"
COOKBOOK = ("tinker-cookbook==0.6.1", "tinker==0.38.0", "chz", "termcolor", "blobfile", "pyqwest", "pyrage")
VERIFIERS = ("verifiers[openenv]==0.4.0",)


def cookbook() -> Path:
    """Makes tinker-cookbook importable in this process, behind all that is installed; skips a test without it."""
    folder = FOLDER / "cookbook"
    _require(folder / "tinker_cookbook", "cookbook")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return folder


def verifiers() -> Path:
    """The Python of the environment that has verifiers; skips a test without it."""
    python = FOLDER / "verifiers" / "bin" / "python"
    _require(python, "verifiers")
    return python


def install(name: str) -> None:
    """With the dependencies that its pins ask for where it has an environment of its own, else without."""
    if name == "cookbook":
        _pip(sys.executable, "--no-deps", "--target", str(FOLDER / name), *COOKBOOK)
    elif name == "verifiers":
        venv.create(FOLDER / name, with_pip=True)
        _pip(str(FOLDER / name / "bin" / "python"), *VERIFIERS)
    else:
        raise SystemExit(f"error: {name}: expected cookbook or verifiers")


def _pip(python: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


def _require(path: Path, name: str) -> None:
    if not path.exists():
        pytest.skip(f"{name} is not installed: make libraries puts it into .libraries, for this test")


if __name__ == "__main__":
    for each in sys.argv[1:] or ["cookbook", "verifiers"]:
        install(each)
