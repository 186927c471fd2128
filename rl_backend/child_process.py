"""Child processes that end when the process that started them ends, however that ends."""

import fcntl
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection

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
