"""The lock of a run's folder, and what is said when the folder cannot be written to."""

import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TextIO

from rl_backend.contracts import ConfigError, RunFolderError

_TRY_SECONDS = 0.5


class RunLock:
    """A run's folder, made, found writable and held by the process of the run as long as it lives, however it ends."""

    def __init__(self, run_dir: Path | str) -> None:
        run_dir = Path(run_dir)
        with usable_run_dir(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / ".lock").open("a+")
            self._take(run_dir)

    def _take(self, run_dir: Path) -> None:
        try:
            _lock(self._file)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise ConfigError.of(
                "run_dir",
                str(run_dir),
                f"is in use by a run that is still alive ({holder}); wait for its end or choose another",
            ) from None
        except OSError as error:
            # Some network file systems have no locks: nobody could train there.
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                self._file.close()
                raise
            warnings.warn(f"{run_dir} cannot be locked ({error.strerror}): let no second run write to it", stacklevel=2)
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):  # what is left in the buffer would be refused again
                self._file.close()
            raise

    def release(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _lock(file: TextIO) -> None:
    # A reader that looks whether the folder is held holds it for a moment itself.
    deadline = time.monotonic() + _TRY_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextmanager
def usable_run_dir(run_dir: Path | str, option: str = "run_dir") -> Iterator[None]:
    """Around what is written before a run begins: an :class:`OSError` becomes a :class:`ConfigError` of ``option``."""
    try:
        yield
    except OSError as error:
        raise ConfigError.of(
            option, str(run_dir), f"cannot be written: {error}; make room, or choose a folder that can be"
        ) from error


def require_writable(folder: Path | str, option: str) -> None:
    """Makes the folder and writes to it, leaves nothing behind, and refuses it where the file system does."""
    with usable_run_dir(folder, option), without_new_folders(Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"1")


@contextmanager
def without_new_folders(folder: Path) -> Iterator[None]:
    """At its end ``folder`` goes again, and those that it lies in, where they were missing at the beginning."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in made:
            if path.is_dir():
                path.rmdir()


@contextmanager
def written_to(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(cannot_write(run_dir, error), path=str(run_dir), errno=error.errno) from error


def free_disk(folder: Path) -> dict[str, float]:
    """``free_disk_gib``, where the file system says it."""
    with suppress(OSError):
        return {"free_disk_gib": shutil.disk_usage(folder).free / 2**30}
    return {}


def cannot_write(run_dir: Path, error: BaseException | str) -> str:
    return f"{run_dir} cannot be written: {error}; make room, then continue from its newest checkpoint with resume=auto"
