"""Every error class of the project."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import rl_backend
from rl_backend.contracts import RLBackendError


def error_classes() -> list[type[RLBackendError]]:
    """RLBackendError and all its subclasses in ``rl_backend``, by name."""
    for module in pkgutil.walk_packages(rl_backend.__path__, "rl_backend."):
        if not module.name.startswith("rl_backend.cli"):
            importlib.import_module(module.name)

    def walk(base: type[RLBackendError]) -> Iterator[type[RLBackendError]]:
        yield base
        for subclass in base.__subclasses__():
            yield from walk(subclass)

    found = {entry for entry in walk(RLBackendError) if entry.__module__.startswith("rl_backend.")}
    return sorted(found, key=lambda entry: entry.__name__)
