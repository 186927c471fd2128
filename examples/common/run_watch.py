"""Starting and ending the process that watches over a run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
import warnings
import weakref
from pathlib import Path

from examples.common import run_watcher


class RunWatch:
    """While it is open, the end of this process without a word makes the state in ``run.json`` of ``folder`` "killed".

    Attributes:
        process: what ``run.json`` says of the process whose run it is: its id and host, and a mark of this run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipe: int | None = None
        self.process = f"{os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:12]}"

    def start(self) -> None:
        """Begins, once ``run.json`` has the first state. Where no process can be started it warns."""
        end, self._pipe = os.pipe()
        _started.add(self)
        try:
            # It leaves at once, and the watcher, its child, goes on.
            subprocess.run(
                [sys.executable, "-I", "-S", run_watcher.__file__, str(self._folder), self.process],
                stdin=end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            warnings.warn(f"{self._folder}/run.json will say running if this run is killed: {error}", stacklevel=2)
        finally:
            os.close(end)

    def close(self) -> None:
        """Ends the watcher, once ``run.json`` has the last state."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)

    def __del__(self) -> None:
        self.close()


def _close_all() -> None:
    for watch in list(_started):
        watch.close()


_started: weakref.WeakSet[RunWatch] = weakref.WeakSet()
# A forked child of a run must not look like the run after the run's end.
os.register_at_fork(after_in_child=_close_all)
