"""Errors of the file system in a run's folder, named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_backend.contracts import ConfigError, RunFolderError


@contextmanager
def usable_run_dir(run_dir: Path | str) -> Iterator[None]:
    """Around what is written before a run begins.

    Raises:
        ConfigError: the file system refuses: no space, read-only, or a file where a folder should be.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError.of(
            "run_dir", str(run_dir), f"cannot be written: {error}; make room, or choose a folder that can be"
        ) from error


@contextmanager
def written_to(run_dir: Path) -> Iterator[None]:
    """Around what is written while a run goes on.

    Raises:
        RunFolderError: the file system refuses.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(cannot_write(run_dir, error), path=str(run_dir), errno=error.errno) from error


def cannot_write(run_dir: Path, error: BaseException | str) -> str:
    """What a run that cannot write to its folder says."""
    return f"{run_dir} cannot be written: {error}; make room, then continue from its newest checkpoint with resume=auto"
