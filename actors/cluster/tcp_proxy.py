"""Authenticated proxy to a port of this machine's loopback address, for processes on other nodes that know a secret.

The owner of the port opens a :class:`Gate` on an address that other nodes reach. A process elsewhere opens a
:class:`TcpProxy`, whose port on its own loopback address leads through the gate. Both ends prove that they know the secret
before a byte passes (HMAC-SHA256 over fresh random numbers of both); what passes then is not encrypted.
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rl_backend.contracts import RLBackendError

# How long a handshake may take, from the connection to the other's proof.
HANDSHAKE_SECONDS = 10.0
# Connections to one gate that have proved nothing yet. One more waits until one proves itself or gives up its place, which
# none keeps for longer than PLACE_SECONDS: who knows no secret must not keep others out.
MOST_PENDING = 256
PLACE_SECONDS = 1.0

_ACCEPT_PAUSE = 0.1
_NONCE = 32
_CHUNK = 2**16
_JOINER, _GATE = b"rl_backend joiner", b"rl_backend gate"


class Listener:
    """Serves each connection to a port, which the system chooses, in its own thread, until it is closed."""

    def __init__(self, host: str, serve: Callable[[socket.socket], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._serve = serve
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name=f"accept {host}:{self.port}", daemon=True).start()

    def close(self) -> None:
        """Takes no more connections; those that are open stay."""
        self._closed.set()
        with suppress(OSError):
            # Closing alone leaves accept() waiting, and the port with it.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            connection = None
            try:
                connection, _ = self._listener.accept()
                self._make_room(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):
                # No descriptor, memory or thread is free, or the other end has gone: the next one may find more.
                if connection is not None:
                    connection.close()
                self._closed.wait(_ACCEPT_PAUSE)

    def _make_room(self, connection: socket.socket) -> None:
        """Called before a connection is served."""


class Gate(Listener):
    """Lets those who know the secret through from ``host`` to ``target``, a port of this machine's loopback address."""

    def __init__(self, host: str, target: tuple[str, int], secret: bytes) -> None:
        self._target = target
        self._secret = secret
        self._pending: dict[socket.socket, float] = {}
        self._place_freed = threading.Condition()
        super().__init__(host, self._admit)

    def _make_room(self, connection: socket.socket) -> None:
        with self._place_freed:
            while len(self._pending) >= MOST_PENDING:
                oldest, since = next(iter(self._pending.items()))
                left = since + PLACE_SECONDS - time.monotonic()
                if left <= 0:
                    del self._pending[oldest]
                    with suppress(OSError):
                        # Its thread sees the end and closes it.
                        oldest.shutdown(socket.SHUT_RDWR)
                else:
                    self._place_freed.wait(left)
            self._pending[connection] = time.monotonic()

    def _admit(self, joiner: socket.socket) -> None:
        try:
            inside = self._shake_hands(joiner)
        except OSError:
            inside = None
        finally:
            with self._place_freed:
                self._pending.pop(joiner, None)
                self._place_freed.notify()
        if inside is None:
            joiner.close()
        else:
            _join(joiner, inside)

    def _shake_hands(self, joiner: socket.socket) -> socket.socket | None:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        joiner.settimeout(HANDSHAKE_SECONDS)
        asked = secrets.token_bytes(_NONCE)
        joiner.sendall(asked)
        answer = _receive(joiner, 2 * _NONCE, deadline)
        nonce, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, _JOINER, asked, nonce)):
            return None
        joiner.sendall(_proof(self._secret, _GATE, asked, nonce))
        return socket.create_connection(self._target, timeout=HANDSHAKE_SECONDS)


class TcpProxy(Listener):
    """A port of this machine's loopback address that leads through a gate elsewhere; raises as :func:`pass_gate`."""

    def __init__(self, loopback: str, gate: tuple[str, int], secret: bytes) -> None:
        self._gate = gate
        self._secret = secret
        pass_gate(gate, secret).close()
        super().__init__(loopback, self._lead)

    def _lead(self, inside: socket.socket) -> None:
        try:
            outside = pass_gate(self._gate, self._secret)
        except RLBackendError:
            inside.close()
            return
        _join(inside, outside)


def pass_gate(gate: tuple[str, int], secret: bytes) -> socket.socket:
    """A connection to what lies behind a gate.

    Raises:
        RLBackendError: the gate does not answer, or has another secret.
    """
    where = f"the rendezvous at {gate[0]}:{gate[1]}"
    try:
        connection = socket.create_connection(gate, timeout=HANDSHAKE_SECONDS)
    except OSError as error:
        raise RLBackendError(
            f"{where} cannot be reached ({error}); a firewall between the nodes must let free ports through"
        ) from error
    nonce = secrets.token_bytes(_NONCE)
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    try:
        asked = _receive(connection, _NONCE, deadline)
        connection.sendall(nonce + _proof(secret, _JOINER, asked, nonce))
        answer = _receive(connection, len(_proof(b"", b"", b"", b"")), deadline)
    except OSError as error:
        connection.close()
        raise RLBackendError(f"{where} turned this process away: it has another secret, or has ended ({error})") from error
    if not hmac.compare_digest(answer, _proof(secret, _GATE, asked, nonce)):
        connection.close()
        raise RLBackendError(f"{where} does not know this group's secret: something else answers there")
    return connection


def _proof(secret: bytes, role: bytes, asked: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + asked + nonce, "sha256")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"its {count} bytes did not come in {HANDSHAKE_SECONDS:g} s")
        connection.settimeout(left)
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the connection was closed")
        received += part
    return received


def _join(one: socket.socket, other: socket.socket) -> None:
    """Passes bytes both ways until both ends have closed."""
    for connection in (one, other):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    back = threading.Thread(target=_pass, args=(other, one), daemon=True)
    back.start()
    _pass(one, other)
    back.join()
    one.close()
    other.close()


def _pass(source: socket.socket, target: socket.socket) -> None:
    try:
        while part := source.recv(_CHUNK):
            target.sendall(part)
    except OSError:
        pass
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
