"""Which functions of this tree each test enters, in every process that it starts.

    REACH=FOLDER python -m pytest -p tests.mutations.reach tests/unit

writes ``FOLDER/PID/tests.jsonl`` (a test, its outcome and seconds a line) and ``entered.tsv`` (number of the test, phase,
file, function), which :func:`entered_by` reads. Child processes are followed through ``sitecustomize``, forked ones by
themselves.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
_PACKAGES = tuple(os.path.join(ROOT, name) + os.sep for name in ("rl_backend", "actors", "adapters", "examples"))
_TOOL = 4
_SETUP = 1 << 30
"""Added to the number of a test while its fixtures are made: tests that share them depend on it as well."""


def follow(folder: str) -> None:
    """Records the functions that this process enters, with the number that ``folder/current`` holds at that moment."""
    current = mmap.mmap(os.open(os.path.join(folder, "current"), os.O_RDWR), 4)
    out = os.open(os.path.join(folder, "entered.tsv"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: set[tuple[bytes, CodeType]] = set()

    # Bound here: at the end of the interpreter the names of a module are gone before the last functions run.
    def entered(
        code: CodeType, _: int, packages: tuple[str, ...] = _PACKAGES, disable: object = sys.monitoring.DISABLE
    ) -> object:
        if not code.co_filename.startswith(packages):
            return disable
        key = (current[:4], code)
        if key not in seen:
            seen.add(key)
            number = int.from_bytes(key[0], "little")
            phase = "setup" if number & _SETUP else "call"
            place = os.path.relpath(code.co_filename, ROOT)
            with suppress(OSError):  # a test may forbid this process to write
                os.write(out, f"{number & ~_SETUP}\t{phase}\t{place}\t{code.co_qualname}\n".encode())
        return None

    sys.monitoring.use_tool_id(_TOOL, "reach")
    sys.monitoring.register_callback(_TOOL, sys.monitoring.events.PY_START, entered)
    sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)


class _Plugin:
    """Numbers the tests of one pytest process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "current").write_bytes(bytes(4))
        self._current = mmap.mmap(os.open(folder / "current", os.O_RDWR), 4)
        self._tests = (folder / "tests.jsonl").open("w")
        self._number = 0

    def _set(self, number: int) -> None:
        self._current[:4] = number.to_bytes(4, "little")

    def pytest_runtest_logstart(self) -> None:
        self._number += 1
        self._set(self._number | _SETUP)

    def pytest_runtest_call(self) -> None:
        self._set(self._number)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            line = {"number": self._number, "test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            self._tests.write(json.dumps(line) + "\n")
            self._tests.flush()


def pytest_configure(config: Any) -> None:
    if top := os.environ.get("REACH"):
        folder = Path(top, str(os.getpid()))
        config.pluginmanager.register(_Plugin(folder))
        os.environ["REACH_HERE"] = str(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent / "following"), os.environ.get("PYTHONPATH", "")]
        )
        follow(str(folder))


def entered_by(top: Path) -> dict[tuple[str, str], dict[str, float]]:
    """(file, function) -> the tests that entered it and passed, with their seconds.

    A function that was entered while fixtures were made counts for every test of that file.
    """
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for folder in filter(Path.is_dir, top.iterdir()):
        passed: dict[int, tuple[str, float]] = {}
        of_file: dict[str, dict[str, float]] = defaultdict(dict)
        file_of: dict[int, str] = {}
        for line in (folder / "tests.jsonl").read_text().splitlines():
            test = json.loads(line)
            file_of[test["number"]] = test["test"].partition("::")[0]
            if test["outcome"] == "passed":
                passed[test["number"]] = test["test"], test["seconds"]
                of_file[file_of[test["number"]]][test["test"]] = test["seconds"]
        for line in (folder / "entered.tsv").read_text().splitlines():
            number, phase, file, function = line.split("\t")
            # What an inner function or a comprehension enters counts for the function around it as well.
            names = {(file, function.partition(".<locals>")[0]), (file, function.replace(".<locals>", ""))}
            for name in names:
                if phase == "setup":
                    found[name] |= of_file.get(file_of.get(int(number), ""), {})
                elif int(number) in passed:
                    test_id, seconds = passed[int(number)]
                    found[name][test_id] = seconds
    return dict(found)
