"""Replacing a directory: whenever a process is killed, the old or the new one is found."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from rl_backend.checkpoint.durable_commit import rename_synced
from rl_backend.checkpoint.training_state import on_every_rank
from rl_backend.parallel.groups import world_group


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yields a path to write flushed files to, which then replaces ``path``. A collective over all ranks.

    Raises:
        CheckpointError: the file system refuses; on every rank, and the earlier directory has its name.
    """
    finish_replacing(path)
    new, old = _new(path), _old(path)
    with on_every_rank(world_group(), f"{path} cannot be replaced"):
        if dist.get_rank() == 0:
            for left_behind in (new, old):
                shutil.rmtree(left_behind, ignore_errors=True)
    yield new
    with on_every_rank(world_group(), f"{new} could not take the place of {path}"):
        if dist.get_rank() == 0:
            _take_place(path)


def found_name(path: Path) -> Path:
    """The current name of the directory ``path``, which a kill may have left under another one. Changes nothing."""
    if path.exists() or not _old(path).exists():
        return path
    return _new(path) if _new(path).exists() else _old(path)


def exists_on_rank_0(path: Path) -> bool:
    """Rank 0's answer, on every rank. A collective over all ranks."""
    found = [path.exists()]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def finish_replacing(path: Path) -> None:
    """Gives a directory its name that a kill has left without it; a collective over all ranks, which fail together."""
    with on_every_rank(world_group(), f"{path} could not be given its name; rename the one that a kill left next to it"):
        if dist.get_rank() == 0:
            found = found_name(path)
            if found != path:
                rename_synced(found, path)


def _take_place(path: Path) -> None:
    new, old = _new(path), _old(path)
    # A kill between the two renames leaves both under names that found_name knows.
    if path.exists():
        path.rename(old)
    try:
        rename_synced(new, path)
    except OSError:
        if old.exists() and not path.exists():
            with suppress(OSError):
                old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
