"""What keeps faults from being tried, found without running a test: ``make mutate ARGS=--check``. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.mutations.copies import ROOT
from tests.mutations.fault import Fault


def problems(faults: Iterable[Fault], root: Path = ROOT) -> list[str]:
    """A sentence for each problem: code that is not in one place, a file that Python would not read, no such test."""
    listed = list(faults)
    twice = [name for name, count in Counter(fault.name for fault in listed).items() if count > 1]
    return [f"{name}: two faults have this name" for name in twice] + [
        f"{fault.name}: {problem}" for fault in listed for problem in _problems_of(fault, root)
    ]


def _problems_of(fault: Fault, root: Path) -> Iterator[str]:
    if fault.old == fault.new or not fault.tests or not fault.why:
        yield "it changes nothing, names no test or does not say why it matters"
    try:
        place = fault.place(root)
        compile(place.text, str(place.file), "exec", dont_inherit=True)  # quicker than to parse: no tree is made
    except (ValueError, SyntaxError) as error:
        yield f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
    try:
        fault.test_ids(root)
    except ValueError as error:
        yield str(error)
