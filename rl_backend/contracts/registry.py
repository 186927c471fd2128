"""Name to entry, with errors that list what is known."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from rl_backend.contracts.errors import RegistryError


class Registry[T]:
    """A registry of one kind of thing.

    Args:
        kind: what an entry is, for messages ("runtime", "model family").
        how: the call that adds one, for messages.
        built_in: module that adds the entries that are always there; imported when a name is asked for that is not.
    """

    def __init__(self, kind: str, how: str, *, built_in: str | None = None) -> None:
        self._kind = kind
        self._how = how
        self._built_in = built_in
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Adds ``entry``; a second, different entry of one name raises :class:`RegistryError`."""
        known = self._entries.get(name)
        if known is not None and known != entry:
            raise RegistryError(f"{self._kind} {name!r} is registered already; choose another name", name=name)
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Removes an entry; unknown names raise :class:`RegistryError`."""
        self.get(name)
        del self._entries[name]

    def get(self, name: str) -> T:
        """The entry of that name; raises :class:`RegistryError` when there is none."""
        if name not in self:
            known = ", ".join(sorted(self._entries)) or "none"
            raise RegistryError(f"unknown {self._kind} {name!r}; known: {known}; {self._how} adds one", name=name)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._add_built_in()
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        if name not in self._entries:
            self._add_built_in()
        return name in self._entries

    def _add_built_in(self) -> None:
        if self._built_in is not None:
            importlib.import_module(self._built_in)
