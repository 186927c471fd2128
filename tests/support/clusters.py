"""Ray clusters of a test's own, apart from the session's, with token authentication; drivers are processes of their own."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import requests

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
WORKER_PORTS = 200


class OwnCluster:
    """What a cluster of a test's own has in common: a token, a folder with a short path, and an orderly end.

    Attributes:
        environment: of processes that have the cluster's token.
    """

    def __init__(self) -> None:
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_worker_niceness": "0",
            # A raylet whose agent has not registered by then ends, and the whole cluster with it.
            "RAY_agent_register_timeout_ms": "120000",
        }
        self._ending = ExitStack()
        # Ray's sockets lie in it, and their paths may have 107 characters.
        self.folder = tempfile.mkdtemp(prefix="rlb", dir="/tmp")
        self._ending.callback(shutil.rmtree, self.folder, ignore_errors=True)

    def python(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """A Python process with the cluster's token; its output is one text."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment | environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, timeout: float = 150.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """:meth:`python`, to its end."""
        process = self.python(*arguments, **environment)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"{arguments} did not end within {timeout:g} s:\n{output}") from None
        if self._process.poll() is not None:
            raise AssertionError(f"the cluster ended with {self._process.returncode}:\n{self._log()}\n{output}")
        return subprocess.CompletedProcess(arguments, process.returncode, output)

    def _log(self) -> str:
        """What the cluster wrote, and the ends of the logs of those of its processes that may have ended it."""
        logs = Path(self.folder).glob("session_latest/logs/*")
        wanted = [log for log in sorted(logs) if re.fullmatch(r"(raylet|gcs_server|dashboard\w*)\.(out|err|log)", log.name)]
        texts = [(log.name, log.read_text(errors="replace")[-2000:]) for log in (Path(self.folder) / "start.log", *wanted)]
        return "\n".join(f"{name}:\n{text}" for name, text in texts if text)

    def _start(self, command: Sequence[str], stdin: int | IO[str] = subprocess.DEVNULL) -> None:
        log = self._ending.enter_context((Path(self.folder) / "start.log").open("w"))
        self._process = subprocess.Popen(
            command,
            env=self.environment,
            cwd=ROOT,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self._ending.callback(_end, self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._ending.close()


class TwoNodes(OwnCluster):
    """:mod:`tests.support.two_nodes`; drivers connect by ``RAY_ADDRESS``.

    Args:
        apart: in a network of its own, whose links can be cut; drivers are started with :attr:`inside`.

    Attributes:
        nodes: ids of the two nodes with CPUs.
        inside: what a command is started with that is to be in the cluster's network.
    """

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self._last = 2
        self.inside: tuple[str, ...] = ()
        # Rules before the one that leads to this machine's own addresses need its place.
        network = 'ip link set lo up && ip rule add pref 9 lookup local && ip rule del pref 0 && exec "$@"'
        around = ("unshare", "--net", "sh", "-c", network, "sh") if apart else ()
        script = (sys.executable, "-m", "tests.support.two_nodes")
        self._start([*around, *script, self.folder, self._address], subprocess.PIPE)
        assert self._process.stdout is not None
        found = json.loads(self._process.stdout.readline())
        self.nodes: list[str] = found["nodes"]
        self.environment["RAY_ADDRESS"] = found["address"]
        if apart:
            self.inside = ("nsenter", f"--net=/proc/{self._process.pid}/ns/net")

    @property
    def _address(self) -> str:
        """Of the last node: not the others', as on another machine, so what meets over both goes through a gate."""
        return f"127.0.0.{self._last}"

    def remove_last_node(self) -> None:
        """Kills the last node's raylet and all that runs under it."""
        self._tell("remove")

    def cut_last_node_off(self) -> None:
        """From now on nothing that is sent to the last node's address arrives, on old connections too."""
        subprocess.run((*self.inside, "ip", "rule", "add", "pref", "1", "to", self._address, "blackhole"), check=True)

    def add_another_node(self) -> None:
        """In the place of one that was lost."""
        self._last += 1
        self._tell(f"add {self._address}")

    def _tell(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()


class HeadNode(OwnCluster):
    """``ray start --head`` as an administrator runs it, on ports of its own.

    Attributes:
        address: of the job server.
    """

    def __init__(self, cpus: int) -> None:
        super().__init__()
        port, dashboard, client, agent_http, agent_grpc, metrics = _free_ports(6)
        workers = _free_range(WORKER_PORTS)
        self.address = f"http://127.0.0.1:{dashboard}"
        self._start(
            [
                *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus", str(cpus)),
                *("--node-ip-address", "127.0.0.1", "--port", str(port), "--dashboard-port", str(dashboard)),
                *("--ray-client-server-port", str(client), "--dashboard-agent-listen-port", str(agent_http)),
                *("--dashboard-agent-grpc-port", str(agent_grpc), "--metrics-export-port", str(metrics)),
                *("--min-worker-port", str(workers), "--max-worker-port", str(workers + WORKER_PORTS - 1)),
                *("--object-store-memory", str(200 * 2**20), "--temp-dir", self.folder),
            ]
        )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        while time.monotonic() < deadline:
            with suppress(requests.RequestException):
                if requests.get(f"{self.address}/api/version", headers=headers, timeout=5).ok:
                    return
            time.sleep(0.3)
        log = self._log()
        self._ending.close()
        raise AssertionError(f"the head node did not start within {START_SECONDS:g} s:\n{log}")


def _end(process: subprocess.Popen[str]) -> None:
    """Asks the cluster to end, then makes sure of all processes in its session."""
    if process.stdin is not None:
        process.stdin.close()
    else:
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _free_range(count: int) -> int:
    """First of ``count`` ports, below those that the kernel hands out, of which none is in use."""
    for first in range(21000, 31000, count):
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError(f"no {count} ports in a row are free")
