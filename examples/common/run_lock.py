"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
from pathlib import Path
from typing import Self

from rl_backend.contracts import ConfigError


class RunLock:
    """Held by the process of a run as long as it lives, however it ends.

    Raises:
        ConfigError: another process holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / ".lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise ConfigError.of(
                "run_dir", str(run_dir), f"is in use by a run that goes on ({holder}); wait for its end or choose another"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                self._file.close()
                raise
            warnings.warn(f"{run_dir} cannot be locked ({error.strerror}): let no second run write to it", stacklevel=2)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
