"""Log files of a run, which a resumed run cuts back to what its checkpoint knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from rl_backend.checkpoint.manifest import FileFacts
from rl_backend.checkpoint.training_state import file_facts
from rl_backend.contracts import ConfigError
from rl_backend.lab.text import json_text


class LogFile:
    """Lines that are appended to a file, each whole when it is written.

    Args:
        kept: of its bytes; later ones are cut off. None keeps nothing.

    Raises:
        ConfigError: it does not begin with what is kept.
    """

    def __init__(self, path: Path, kept: FileFacts | None = None) -> None:
        self._digest, self._size = xxhash.xxh3_64(), 0
        if kept is not None:
            require_unchanged(path, kept)
            with path.open("rb") as stream:
                while self._size < kept.num_bytes:
                    self._count(stream.read(min(kept.num_bytes - self._size, 1 << 22)))
        self._file = path.open("ab", buffering=0)
        self._file.truncate(self._size)

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Appends one line for each."""
        text = "".join(json_text(line, ensure_ascii=False) + "\n" for line in lines).encode()
        self._count(text)
        while text:
            text = text[self._file.write(text) :]

    def sync(self) -> FileFacts:
        """Flushes the lines to the disk; what the file then holds."""
        os.fsync(self._file.fileno())
        return FileFacts(num_bytes=self._size, xxh3=self._digest.hexdigest())

    def close(self) -> None:
        """Ends it."""
        self._file.close()

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)


def require_unchanged(log: Path, facts: FileFacts) -> None:
    """Checks that a log begins with the lines that it had when a checkpoint was saved.

    Raises:
        ConfigError: lines are lost or changed, or it cannot be read.
    """
    try:
        found = file_facts(log, facts.num_bytes)
    except OSError as error:
        raise ConfigError.of("resume", str(log), f"cannot be read: {error}") from None
    if found.num_bytes < facts.num_bytes:
        problem = f"has lost lines: it had {facts.num_bytes} bytes at the checkpoint and has {found.num_bytes}"
    elif found != facts:
        problem = f"is damaged: its first {facts.num_bytes} bytes are not those that it had at the checkpoint"
    else:
        return
    raise ConfigError.of("resume", str(log), f"{problem}; repair it, or continue from the checkpoint in a new run_dir")
