"""Preload of multiprocessing's ``forkserver`` that ends it soon after the process that started it.

Importing it is the effect. A server finds out by itself only when it has imported all that it preloads, which may take half
a minute, and when the processes that it forked have ended: these are tied on their own
(:mod:`rl_backend.child_process`). A timer and no thread, because the server forks.
"""

from __future__ import annotations

import os
import signal

_SECONDS = 1.0
_STARTER = os.getppid()


def _end_without_starter(*_: object) -> None:
    if os.getppid() != _STARTER:
        os._exit(1)


signal.signal(signal.SIGALRM, _end_without_starter)
signal.setitimer(signal.ITIMER_REAL, _SECONDS, _SECONDS)
