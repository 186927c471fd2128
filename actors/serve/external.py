"""Weights for download: files that only their recipients can read, and addresses that need no key."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_backend.contracts import BatchError, UnsupportedError

_LINK_SECONDS = 3600.0
_MOST_RECIPIENTS = 10


class Links:
    """Addresses of files, for an hour. They end with the server, and a client asks for new ones."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[Path, float]] = {}

    def make(self, folder: Path) -> tuple[Mapping[str, str], float]:
        """Each file's name with the end of its address, and when these expire."""
        token, now = secrets.token_urlsafe(32), time.time()
        self._folders = {each: kept for each, kept in self._folders.items() if kept[1] > now}
        self._folders[token] = (folder, now + _LINK_SECONDS)
        return {file.name: f"{token}/{file.name}" for file in sorted(folder.iterdir())}, now + _LINK_SECONDS

    def find(self, token: str, name: str) -> Path | None:
        folder, expires = self._folders.get(token, (None, 0.0))
        if folder is None or expires < time.time():
            return None
        return next((file for file in folder.glob("*") if file.name == name), None)


def recipients_in(asked: Mapping[str, Any]) -> Sequence[Any]:
    """To whom weights are encrypted with age; none for weights that are not.

    Raises:
        BatchError: no public key of age or SSH, or too many.
        UnsupportedError: the server lacks the library.
    """
    given = asked.get("age_encryption_recipients")
    if not given:
        return ()
    if not isinstance(given, list) or len(given) > _MOST_RECIPIENTS:
        raise BatchError(f"age_encryption_recipients={given!r:.200}: expected up to {_MOST_RECIPIENTS} public keys")
    try:
        import pyrage
    except ModuleNotFoundError:
        raise UnsupportedError(
            "age_encryption_recipients: the server has no pyrage; leave them out, or let its operator install it"
        ) from None
    try:
        return [(pyrage.x25519 if each.startswith("age1") else pyrage.ssh).Recipient.from_str(each) for each in given]
    except (AttributeError, pyrage.RecipientError) as error:
        raise BatchError(f"age_encryption_recipients={given!r:.200}: {error}; expected keys age1... or of SSH") from None


def encrypt(folder: Path, recipients: Sequence[Any]) -> None:
    """Puts an encrypted file ``NAME.age`` in the place of every file; without recipients all stays as it is."""
    if not recipients:
        return
    import pyrage

    for file in list(folder.iterdir()):
        pyrage.encrypt_file(str(file), f"{file}.age", list(recipients))
        file.unlink()
