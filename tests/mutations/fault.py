"""What a fault is, and the list of all of them."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from pathlib import Path
from typing import NamedTuple

from tests.mutations import faults
from tests.mutations.places import Place, find_place, find_test, used_by
from tests.mutations.source import meaning

NAMED = "audit"
"""The area of faults that every run must kill; of the others a few may survive for a reason."""


class Fault(NamedTuple):
    """One deliberate fault.

    Attributes:
        name: unique.
        where: ``module:qualname`` of the function, class or (without a name) module that has it.
        old: code that stands there once.
        new: what stands in its place; :func:`tests.mutations.places.find_place` says how both are read.
        tests: names of test functions, the quickest first; one that fails is enough. Parameters may follow a name, and the
            test's file and ``::`` precede it where several files have a test of this name.
        why: what would go wrong for a user.
        equivalent: why no test can notice it; empty for a fault that must be killed.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    equivalent: str = ""

    def place(self, root: Path) -> Place:
        """Where it stands in a tree, and the file's text with it; raises what :func:`find_place` does."""
        return find_place(root, self.where, self.old, self.new)

    def test_ids(self, root: Path) -> list[str]:
        """The pytest ids of its tests; raises :class:`ValueError` if there is not one test of each name."""
        return [find_test(root, test) for test in self.tests]

    def digest(self, root: Path) -> str:
        """Of what the result depends on: the fault, its function, the tests and what their files have beside tests.

        A result with another digest is stale. Files, modules, imports, docstrings and layout do not count, so that a move
        keeps results.
        """
        tests = tuple(test.rpartition("::")[2] for test in self.tests)
        found = hashlib.sha256(repr((self.old, self.new, tests)).encode())
        for node in (*self.place(root).scopes, *used_by(root, self.test_ids(root))):
            found.update(meaning(node).encode())
        return found.hexdigest()[:16]


def all_faults() -> dict[str, list[Fault]]:
    """Area -> its faults; areas are the modules of ``tests/mutations/faults``."""
    names = sorted(module.name for module in pkgutil.iter_modules(faults.__path__))
    return {name: list(importlib.import_module(f"{faults.__name__}.{name}").FAULTS) for name in names}
