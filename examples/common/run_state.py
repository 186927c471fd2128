"""``run.json``: how a run stands."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SPARE_BYTES = 64 << 10
_LONGEST_ERROR = 8000


class RunState:
    """Writes ``run.json`` of a folder, all or nothing, and the last time on a full disk too.

    The room for the last state is taken with the first one: a file of the same size waits beside it, is overwritten in place
    and takes its name.

    Attributes:
        running: a state was written, and not the last one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "run.json"
        self._spare = folder / ".run.json.spare"
        self.running = False

    def write(self, facts: Mapping[str, Any], *, last: bool) -> None:
        """Replaces what the file holds.

        Args:
            facts: JSON; ``error``, a text or None, is cut where it is very long.
            last: no other state follows.

        Raises:
            OSError: the file system refuses.
        """
        error = facts.get("error")
        if error is not None and len(error) > _LONGEST_ERROR:
            facts = {**facts, "error": f"{error[:_LONGEST_ERROR]}..."}
        text = (json.dumps(facts, indent=2) + "\n").encode()
        if not last:
            self._take_room(len(text))
        with self._spare.open("r+b" if self._spare.exists() else "w+b") as file:
            file.write(text)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._spare.replace(self._path)
        self.running = not last
        if not last:
            self._take_room(len(text))

    def _take_room(self, size: int) -> None:
        with self._spare.open("wb") as file:
            file.write(bytes(size + _SPARE_BYTES))
            file.flush()
            os.fsync(file.fileno())
