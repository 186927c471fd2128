"""The guessing game of :mod:`tests.support.openenv_server`, served on a free port by the Python that has OpenEnv."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.libraries import verifiers

_SERVER = Path(__file__).with_name("openenv_server.py")


@contextmanager
def served_game() -> Iterator[str]:
    """Its address."""
    python = verifiers()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([str(python), str(_SERVER), str(port)], stdin=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/schema", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()
