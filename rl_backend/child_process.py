"""Child processes that end when the process that started them ends, however that ends."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

# The end of a pipe that this process has alone, and that nothing is written to: it closes when the process ends.
_writer = -1


def open_lifeline() -> Connection:
    """What a new child process inherits, to be tied to this process with :func:`tie`; the child does nothing with it::

    with open_lifeline() as line:
        process = subprocess.Popen(command, pass_fds=[line.fileno()])
        tie(process.pid, line)
    """
    # Opened anew: who gets the signal is a property of the open file.
    return Connection(os.open(f"/proc/self/fd/{_writer}", os.O_RDONLY | os.O_CLOEXEC), writable=False)


def tie(pid: int, line: Connection) -> None:
    """From now on the kernel kills process ``pid``, which has inherited ``line``, when this process has ended."""
    # The child need not cooperate: it may be importing, inside of a C function, or made by another process or by a thread
    # that has ended, which PR_SET_PDEATHSIG would take for its parent.
    with suppress(ProcessLookupError):  # it has ended already
        fcntl.fcntl(line.fileno(), fcntl.F_SETOWN, pid)
        fcntl.fcntl(line.fileno(), fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(line.fileno(), fcntl.F_SETFL, fcntl.FASYNC)


def start_script(
    python: str, script: Path, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process of a script, tied to this one, and the connection to it: the script is given the number of its end."""
    ours, theirs = multiprocessing.Pipe()
    with theirs, open_lifeline() as line:
        command, inherited = [python, "-P", str(script), str(theirs.fileno())], (theirs.fileno(), line.fileno())
        # Signals to the run's group, of a terminal or a scheduler, are for the run: it ends this process when it ends.
        process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, env=environment, process_group=0)
        tie(process.pid, line)
    return process, ours


def _open_pipe() -> None:
    global _writer
    reader, _writer = os.pipe()
    os.close(reader)


def _replace_pipe() -> None:
    os.close(_writer)
    _open_pipe()


_open_pipe()
# A fork would keep the pipe of its parent open.
os.register_at_fork(after_in_child=_replace_pipe)
