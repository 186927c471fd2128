"""What a fault is, and the list of all of them."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from pathlib import Path
from typing import NamedTuple

from tests.mutations import faults

NAMED = "audit"
"""The area of faults that every run must kill; of the others a few may survive for a reason."""


class Fault(NamedTuple):
    """One deliberate fault.

    Attributes:
        name: unique.
        file: path in the repository.
        old: text that stands in the file once.
        new: what stands in its place.
        tests: pytest ids, the quickest first; one that fails is enough.
        why: what would go wrong for a user.
        equivalent: why no test can notice it; empty for a fault that must be killed.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    equivalent: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the fault; raises :class:`ValueError` unless ``old`` stands in it once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: the old text stands {count} times in {self.file}; it must stand there once")
        return text.replace(self.old, self.new)

    def digest(self, root: Path) -> str:
        """Of all that the result depends on: the fault, the file and the tests. A result with another one is stale."""
        found = hashlib.sha256(repr((self.file, self.old, self.new, self.tests)).encode())
        for file in (self.file, *sorted({file_of(test) for test in self.tests})):
            found.update((root / file).read_bytes())
        return found.hexdigest()[:16]


def file_of(test: str) -> str:
    """The file of a pytest id."""
    return test.partition("::")[0]


def all_faults() -> dict[str, list[Fault]]:
    """Area -> its faults; areas are the modules of ``tests/mutations/faults``."""
    names = sorted(module.name for module in pkgutil.iter_modules(faults.__path__))
    return {name: list(importlib.import_module(f"{faults.__name__}.{name}").FAULTS) for name in names}
