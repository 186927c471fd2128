"""What keeps faults from being tried, found without running a test: ``make mutate ARGS=--check``. Imports no torch."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.mutations.copies import ROOT
from tests.mutations.fault import Fault, file_of


def problems(faults: Iterable[Fault], root: Path = ROOT) -> list[str]:
    """A sentence for each problem: a text that is not in its file once, a file that Python would not read, no such test."""
    listed = list(faults)
    twice = [name for name, count in Counter(fault.name for fault in listed).items() if count > 1]
    return [f"{name}: two faults have this name" for name in twice] + [
        f"{fault.name}: {problem}" for fault in listed for problem in _problems_of(fault, root)
    ]


def _problems_of(fault: Fault, root: Path) -> Iterator[str]:
    if fault.old == fault.new or not fault.tests or not fault.why:
        yield "it changes nothing, names no test or does not say why it matters"
    try:
        changed = fault.applied((root / fault.file).read_text())
        if fault.file.endswith(".py"):
            ast.parse(changed, fault.file)
    except (OSError, ValueError, SyntaxError) as error:
        yield f"{type(error).__name__}: {error}".removeprefix(f"ValueError: {fault.name}: ")
    for test in fault.tests:
        if test.partition("::")[2].partition("[")[0] not in _tests_in(root / file_of(test)):
            yield f"there is no test {test}"


@cache
def _tests_in(file: Path) -> frozenset[str]:
    if not file.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
