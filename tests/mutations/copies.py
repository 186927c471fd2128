"""A copy of the working tree to put faults into."""

from __future__ import annotations

import compileall
import hashlib
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.mutations.fault import Fault

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(target: Path) -> None:
    """Copies what git tracks and what it does not ignore, as it is in the working tree, and compiles it.

    Bytecode is checked by the contents of its source: by time and size, a fault that keeps the size would not be noticed.
    """
    for name in _files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to(Path(sys.prefix))
    if (ROOT / ".libraries").exists():
        (target / ".libraries").symlink_to((ROOT / ".libraries").resolve())
    for package in ("rl_backend", "actors", "adapters", "examples", "benchmarks", "tests"):
        compileall.compile_dir(target / package, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def tree_digest(copy: Path, test: str) -> str:
    """Of all that a test without a fault depends on: the code, what tests share, and the file of the test."""
    found = hashlib.sha256()
    for file in sorted(copy.rglob("*.py")):
        name = file.relative_to(copy).as_posix()
        if not name.startswith((".", "tests/mutations/")) and ("/test_" not in name or name == test):
            found.update(name.encode() + file.read_bytes())
    return found.hexdigest()[:16]


def _files() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


@contextmanager
def applied(fault: Fault, copy: Path) -> Generator[None]:
    """The copy has the fault inside of this context."""
    place = fault.place(copy)
    text = place.file.read_text()
    place.file.write_text(place.text)
    try:
        yield
    finally:
        place.file.write_text(text)
