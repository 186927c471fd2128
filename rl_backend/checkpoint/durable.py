"""Names in the file system that are there after a power cut, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flushes everything in a directory, then its names."""
    for entry in directory.rglob("*"):
        sync(entry)
    sync(directory)


def rename_synced(old: Path, new: Path) -> None:
    """Renames within a directory and flushes that. Where it fails, ``old`` has its name and ``new`` is not there.

    Raises:
        OSError: the file system refuses; with a note if it refuses to take the new name back as well.
    """
    old.rename(new)
    try:
        sync(new.parent)
    except OSError as error:
        # What is said to have failed must not be found.
        try:
            new.rename(old)
        except OSError as again:
            error.add_note(f"{new} stays, as it could not be renamed back: {again}")
        raise
