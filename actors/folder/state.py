"""``run.json``, which says how a run stands, and the process that watches over it."""

import json
import os
import socket
import subprocess
import sys
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.cluster.processes import driver_mark
from actors.folder import watcher

_SPARE_BYTES = 64 << 10
_LONGEST_ERROR = 8000


class RunState:
    """Writes ``run.json`` of a folder, all or nothing, the last time even on a full disk.

    Attributes:
        running: a state was written, and not the last one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "run.json"
        self._spare = folder / ".run.json.spare"
        self.running = False

    def write(self, facts: Mapping[str, Any], *, last: bool) -> None:
        """Replaces what the file holds; ``facts`` is JSON, and no other state follows the ``last``."""
        error = facts.get("error")
        if error is not None and len(error) > _LONGEST_ERROR:
            facts = {**facts, "error": f"{error[:_LONGEST_ERROR]}..."}
        text = (json.dumps(facts, indent=2) + "\n").encode()
        # The room for the last state is taken with the first one: a file of the same size waits beside it, is overwritten in
        # place and takes its name.
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


class RunWatch:
    """While it is open, the end of this process without a word makes the state in ``run.json`` of ``folder`` "killed", and
    ends a Ray that this process has started, with all of its processes.

    Attributes:
        process: what ``run.json`` says of the process whose run it is: its id and host, and a mark of this run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end: Callable[[], None] = lambda: None
        self.process = f"{os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:12]}"

    def start(self) -> None:
        """Begins, once ``run.json`` has the first state. Warns if no process can be started."""
        end, pipe = os.pipe()
        finish = weakref.finalize(self, os.close, pipe)
        finish.atexit = False  # the kernel closes the pipe of a process that ends
        self._end = finish
        _started.add(self)
        try:
            # It exits at once; the watcher, its child, stays. -I -S: it imports nothing of the user's environment.
            subprocess.run(
                [sys.executable, "-I", "-S", watcher.__file__, str(self._folder), self.process, driver_mark()],
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
        self._end()


def _close_all() -> None:
    for watch in list(_started):
        watch.close()


_started: weakref.WeakSet[RunWatch] = weakref.WeakSet()
# A forked child of a run must not look like the run after the run's end.
os.register_at_fork(after_in_child=_close_all)


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"is a {type(found).__name__}, not a JSON object")
    return found
