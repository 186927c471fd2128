"""A server in a process of its own, started again when it ends: the port stays, and clients that poll wait meanwhile."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from rl_backend.contracts import RLBackendError

_MOST_FAILED_STARTS = 3
_WAIT_SECONDS = 2.0

type Serve = Callable[[socket.socket, argparse.Namespace, Callable[[], None]], None]


class ServerLostError(RLBackendError):
    """What serves has ended, and the process with it: whoever started it starts it again."""


def keep_serving(serve: Serve, listener: socket.socket, options: argparse.Namespace) -> int:
    """Serves in processes, one after another, until one ends on its own accord or this one gets a signal. The exit status.

    The port is held here: connections of clients wait in it while no process serves. A server that fails before it has
    served for the first time is not started again, one that fails later is tried three times in a row.

    Args:
        serve: what a process runs.
    """
    # A copy of this process, which does nothing but wait, has what is imported here.
    fork, failed, served = multiprocessing.get_context("fork"), 0, False
    while True:
        up = fork.Event()
        process = fork.Process(target=_serve, args=(serve, listener, options, up), name="server")
        status = _status(process)
        if up.is_set():
            served, failed = True, 0
        else:
            failed += 1
        if status == 0 or not served or failed == _MOST_FAILED_STARTS:
            return status
        # Words for whoever reads the terminal; the server's own log is above them.
        sys.stderr.write(f"the server's process has ended with status {status}; starting it again\n")
        time.sleep(_WAIT_SECONDS if failed else 0.0)


def _status(process: BaseProcess) -> int:
    """Runs the process to its end; a signal to this one ends it first, within 20 seconds. A second one ends it at once."""
    try:
        process.start()
        process.join()
    except BaseException:
        if process.pid is not None:
            try:
                # Ctrl-C reaches both; SIGTERM only this one.
                process.terminate()
                process.join(20)
            finally:
                process.kill()
        raise
    code = process.exitcode or 0
    return code if code >= 0 else 128 - code


def _serve(serve: Serve, listener: socket.socket, options: argparse.Namespace, up: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(listener, options, up.set)
    except RLBackendError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1 if isinstance(error, ServerLostError) else 2) from None
    except KeyboardInterrupt:
        # A signal, of which the process that keeps this one says what there is to say.
        raise SystemExit(128 + signal.SIGTERM) from None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process that was spawned"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
