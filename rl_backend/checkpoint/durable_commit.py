"""Durable files: drafts, flushing, renaming, discarding."""

import logging
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rl_backend.contracts import CheckpointError

logger = logging.getLogger(__name__)


def draft_of(path: Path) -> Path:
    """A free hidden name beside ``path``, to write to before :func:`commit_draft`. Nothing is made."""
    return path.with_name(f".{path.name}.incomplete-{uuid.uuid4().hex[:8]}")


def commit_draft(draft: Path, path: Path) -> None:
    """Gives a complete and flushed draft its name in one step; :class:`OSError` where ``path`` exists, or the disk fails."""
    # A rename would replace an empty directory that appeared at ``path`` after the draft was begun.
    if path.exists():
        raise FileExistsError(f"{path} was made by another process while the draft was written")
    rename_synced(draft, path)


def discard_draft(draft: Path) -> None:
    """Removes the files of a failed save, if any; logs a warning where it cannot."""
    shutil.rmtree(draft, ignore_errors=True)
    if draft.exists():
        logger.warning("the incomplete %s could not be removed", draft)


@contextmanager
def new_directory(path: Path) -> Generator[Path]:
    """A draft to fill, which is flushed and gets the name ``path`` when the body ends; a failure leaves nothing behind."""
    draft = draft_of(path)
    draft.mkdir(parents=True)
    try:
        yield draft
        sync_tree(draft)
        commit_draft(draft, path)
    except BaseException:
        discard_draft(draft)
        raise


def require_new(path: Path) -> None:
    """Raises :class:`~rl_backend.contracts.CheckpointError` unless :func:`new_directory` can make ``path``."""
    if path.exists() or not path.parent.is_dir():
        taken = f"{path} exists already; choose a new directory"
        raise CheckpointError(
            taken if path.exists() else f"{path.parent} is not a directory; create it first", path=str(path)
        )


def write_synced(file: Path, text: str) -> None:
    """Writes a file and flushes it; its name is flushed with its directory."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def replace_text(file: Path, text: str) -> None:
    """Replaces a file in one step: a kill before the end leaves the earlier one."""
    new = file.with_name(f".{file.name}.new")
    write_synced(new, text)
    new.replace(file)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    for entry in directory.rglob("*"):
        sync(entry)
    sync(directory)


def rename_synced(old: Path, new: Path) -> None:
    """Renames within a directory and flushes that; :class:`OSError`, with a note if the rename back fails too."""
    old.rename(new)
    try:
        sync(new.parent)
    except OSError as error:
        # A rename that is reported as failed must not be found.
        try:
            new.rename(old)
        except OSError as again:
            error.add_note(f"{new} stays, as it could not be renamed back: {again}")
        raise


def with_notes(error: OSError) -> str:
    return "; ".join([str(error), *getattr(error, "__notes__", ())])
