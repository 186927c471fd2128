"""A server that ends is started again in a new process, at the port of the one before."""

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
from pathlib import Path
from typing import Any

import pytest

from actors.serve import restarts
from actors.serve.restarts import ServerLostError, _serve, _status, keep_serving
from rl_backend.contracts import ConfigError


def serves(listener: socket.socket, options: argparse.Namespace, up: Callable[[], None]) -> None:
    """Says who it is to whoever connects; the first one until it is killed, the second loses its ranks, the third ends."""
    number = len(list(options.folder.iterdir()))
    (options.folder / f"{number}").write_text(str(os.getpid()))
    listener.listen()
    up()
    if number == 1:
        raise ServerLostError("a rank has ended")
    connection, _ = listener.accept()
    with connection:
        connection.sendall(str(number).encode())
    if number == 0:
        time.sleep(600)


def keep(listener: socket.socket, options: argparse.Namespace, serve: Any = serves) -> None:
    sys.exit(keep_serving(serve, listener, options))


def is_wrong(listener: socket.socket, options: argparse.Namespace, up: Callable[[], None]) -> None:
    raise ConfigError("port: taken")


def test_a_server_is_started_again_until_one_ends_on_its_own_accord(tmp_path: Path) -> None:
    options = argparse.Namespace(folder=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # As of the command it has one thread.
        keeper = multiprocessing.get_context("spawn").Process(target=keep, args=(listener, options))
        keeper.start()
        address = listener.getsockname()
        with socket.create_connection(address, 60) as first:
            assert first.recv(1) == b"0"
        os.kill(int((tmp_path / "0").read_text()), signal.SIGKILL)
        # Nobody serves now; the connection waits in the port.
        with socket.create_connection(address, 60) as second:
            assert second.recv(1) == b"2"
        keeper.join(60)
    assert keeper.exitcode == 0


def test_a_server_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keeper = multiprocessing.get_context("spawn").Process(
            target=keep, args=(listener, argparse.Namespace(folder=tmp_path), is_wrong)
        )
        keeper.start()
        keeper.join(60)
    assert keeper.exitcode == 2


class Deaf:
    """A process that a signal does not end; one comes to its parent at each of the calls ``interrupted``."""

    def __init__(self, *interrupted: str) -> None:
        self.pid: int | None = None
        self.called: list[str] = []
        self._interrupted = interrupted

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name in self._interrupted:
            raise KeyboardInterrupt

    def start(self) -> None:
        self.pid = None if "early" in self._interrupted else 1
        self._call("start")

    def join(self, timeout: float | None = None) -> None:
        self._call("join" if timeout is None else f"join({timeout})")

    def terminate(self) -> None:
        self._call("terminate")

    def kill(self) -> None:
        self._call("kill")


@pytest.mark.parametrize(
    ("interrupted", "called"),
    [
        (("start",), ["start", "terminate", "join(20)", "kill"]),
        (("start", "early"), ["start"]),
        (("join",), ["start", "join", "terminate", "join(20)", "kill"]),
        (("join", "terminate"), ["start", "join", "terminate", "kill"]),
        (("join", "join(20)"), ["start", "join", "terminate", "join(20)", "kill"]),
    ],
)
def test_a_signal_ends_a_server_that_does_not_end_itself(interrupted: tuple[str, ...], called: list[str]) -> None:
    process: Any = Deaf(*interrupted)
    with pytest.raises(KeyboardInterrupt):
        _status(process)
    assert process.called == called


def test_a_server_that_a_signal_ends_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def is_interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(restarts, "_end_with_parent", lambda: None)
    options = argparse.Namespace(folder=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SystemExit) as ended:
        _serve(is_interrupted, listener, options, threading.Event())
    assert ended.value.code == 143 and capsys.readouterr() == ("", "")
