"""Ports for what must open one itself: kept free until it does, and chosen again when another program took one."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

ATTEMPTS = 5
"""Ports that :func:`with_free_port` tries."""


def with_free_port[T](host: str, attempt: Callable[[int], T], *, attempts: int = ATTEMPTS) -> T:
    """``attempt(port)`` with a port that is free at ``host``, for what must open the port itself.

    The port stays bound meanwhile, which keeps it from every program that does not set ``SO_REUSEADDR``; what opens it must
    set that, as torch and vLLM do. If a program takes it even so, ``attempt`` fails and is called again with
    another port.

    Raises:
        OSError: ``host`` is not an address of this machine.
        Exception: what ``attempt`` raises, when it is no clash of ports or the last of ``attempts``.
    """
    for number in range(1, attempts + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0))
            try:
                return attempt(int(holder.getsockname()[1]))
            except Exception as error:  # torch and vLLM report a clash in types of their own
                if number == attempts or not is_port_clash(error):
                    raise
    raise ValueError(f"attempts={attempts}: must be at least 1")


def is_port_clash(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that a port is taken."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno == errno.EADDRINUSE:
            return True
        # torch's DistNetworkError and errors that crossed a process keep no number, only the text.
        if "EADDRINUSE" in str(seen) or os.strerror(errno.EADDRINUSE).lower() in str(seen).lower():
            return True
        seen = seen.__cause__
    return False
