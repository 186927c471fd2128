"""Watch over Ray: a lost cluster is noticed before Ray ends the process with a dump and leaves others behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

import ray
from ray.exceptions import OutOfMemoryError

from actors.cluster.processes import Process, descendants
from rl_backend.contracts import ClusterLostError

END_SECONDS = 20.0
"""How long a run that has lost Ray may take to end in order."""

_POLL_SECONDS, _POLL_SECONDS_ELSEWHERE = 0.5, 2.0
# How long a server elsewhere may be out of reach: a network's hiccup must not end a run.
_PATIENCE = 10.0
_CONNECT_SECONDS = 3.0
_FAMILY_EVERY = 10


@contextmanager
def watch_cluster() -> Iterator[None]:
    """Raises :class:`~rl_backend.contracts.ClusterLostError` in the main thread when Ray's servers are gone.

    They are the cluster's control store (``gcs_server``) and this node's ``raylet``. What this process started is then
    ended. Where the run does not end within ``END_SECONDS`` of the error, because it waits for Ray, the process prints the
    error and ends with exit status 2. Outside of the main thread, which alone can be interrupted, nothing is watched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch()
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: FrameType | None) -> None:
        if watch.pending():
            raise watch.error()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    watch.thread.start()
    try:
        yield
    except Exception as error:
        # What failed first may be a rank that went with Ray.
        if not isinstance(error, ClusterLostError) and watch.found():
            raise watch.error() from error
        raise
    finally:
        watch.stop()
        signal.signal(signal.SIGINT, before)


def cluster_loss() -> ClusterLostError | None:
    """The loss that a watch of this process has found; None while Ray is there."""
    return _loss[-1] if _loss else None


def ray_is_usable() -> bool:
    """Whether calls can be made to Ray: it is initialised, and no watch has found that it is gone."""
    return ray.is_initialized() and not _loss


_loss: list[ClusterLostError] = []
exit_hooks: list[Callable[[ClusterLostError], None]] = []
"""Called, in another thread, before a run that does not end within ``END_SECONDS`` is ended."""


class _Watch:
    def __init__(self) -> None:
        self._checks = _local_checks()
        self._ours = bool(self._checks)
        if not self._ours:
            self._checks = _remote_checks()
        self._family: set[Process] = set()
        self._reason = ""
        self._told = False
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="watch cluster", daemon=True)
        _loss.clear()

    def pending(self) -> bool:
        """Whether the main thread must still be told of a loss; True once."""
        pending = bool(self._reason) and not self._told
        self._told = self._told or pending
        return pending

    def found(self) -> bool:
        self._told = True
        if not self._reason and (reason := self._check()):
            self._note(reason)
        return bool(self._reason)

    def error(self) -> ClusterLostError:
        return _loss[-1]

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(_POLL_SECONDS if self._ours else _POLL_SECONDS_ELSEWHERE):
            if self._ours and count % _FAMILY_EVERY == 0:
                self._family |= descendants()
            count += 1
            if reason := self._check():
                self._end(reason)
                return

    def _check(self) -> str:
        return " and ".join(reason for reason in [check() for check in self._checks.values()] if reason)

    def _note(self, reason: str) -> None:
        error = ClusterLostError(
            f"Ray is lost: {reason}; the run cannot continue. Its last checkpoint is complete: restart with --resume auto",
            reason=reason,
        )
        _loss.append(error)
        self._reason = reason

    def _end(self, reason: str) -> None:
        self._family |= descendants() if self._ours else set()
        self._note(reason)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        # Ray's processes would wait for a minute for what does not come back, and calls to them with it.
        for process in self._family:
            process.kill()
        if not self._stopped.wait(END_SECONDS):
            for say in exit_hooks:
                with suppress(Exception):  # the process must end whatever comes of it
                    say(self.error())
            sys.stderr.write(f"error: {self.error()}\n")
            sys.stderr.flush()
            os._exit(2)


def _local_checks() -> dict[str, Callable[[], str]]:
    node = ray._private.worker._global_node
    processes = {name: infos[0].process for name, infos in (node.all_processes if node else {}).items() if infos}
    return {name: partial(_ended, name, processes[name]) for name in ("gcs_server", "raylet") if name in processes}


def _ended(name: str, process: subprocess.Popen[bytes]) -> str:
    return "" if process.poll() is None else f"its {name} on this machine ended with status {process.returncode}"


def _remote_checks() -> dict[str, Callable[[], str]]:
    context = ray.get_runtime_context()
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    host, _, port = context.gcs_address.rpartition(":")
    raylet = (here["NodeManagerAddress"], here["NodeManagerPort"])
    return {
        "gcs_server": _Port("its control store (gcs_server)", (host.strip("[]"), int(port))),
        "raylet": _Port("the raylet of this node", raylet),
    }


class _Port:
    def __init__(self, name: str, address: tuple[str, int]) -> None:
        self._name = name
        self._address = address
        self._failing_since: float | None = None

    def __call__(self) -> str:
        try:
            socket.create_connection(self._address, timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since >= _PATIENCE:
                where = f"{self._address[0]}:{self._address[1]}"
                return f"{self._name} at {where} has not answered for {_PATIENCE:g} s ({error})"
        else:
            self._failing_since = None
        return ""


WHAT_TO_SET = (
    "lower --max-tokens-per-micro-batch, recompute layers (--train.backend_cfg.activation_checkpointing full in the native "
    "runtime), or free memory"
)

# A line of Ray's table of the largest processes: PID, GB, command.
_USER = re.compile(r"^\s*\d+\s+(\d+(?:\.\d+)?)\s+(\S.*)$", re.MULTILINE)
_KINDS = (("ray::TrainWorker", "training rank"), ("ray::RolloutEngine", "engine"), ("ray::", "Ray's worker"))
_SHOWN, _LEAST = 4, 0.5


def memory_death(error: BaseException) -> str:
    """Who held how much, and what to set; empty for any other error."""
    if not isinstance(error, OutOfMemoryError):
        return ""
    used = re.search(r"(\d+(?:\.\d+)?)\s?GB / (\d+(?:\.\d+)?)\s?GB", str(error))
    of = f", {used[1]} of {used[2]} GB in use" if used else ""
    held = _largest((float(size), command) for size, command in _USER.findall(str(error)))
    return f"its machine ran out of memory{of}{f' ({held})' if held else ''}, and Ray killed it; {WHAT_TO_SET}"


def memory_held() -> str:
    """Who holds how much of this machine's memory now."""
    users = []
    for folder in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended meanwhile, or is hidden
            pages = int(Path(f"/proc/{folder}/statm").read_text().split()[1])
            command = Path(f"/proc/{folder}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            users.append((round(pages * os.sysconf("SC_PAGE_SIZE") / 1e9, 2), command.strip() or "kernel"))
    return _largest(users)


def _largest(users: Iterable[tuple[float, str]]) -> str:
    shown = sorted((user for user in users if user[0] >= _LEAST), reverse=True)[:_SHOWN]
    return "; ".join(f"{_kind(command)} {size:g} GB" for size, command in shown)


def _kind(command: str) -> str:
    return next((kind for start, kind in _KINDS if command.startswith(start)), command.split()[0].rsplit("/", 1)[-1][:40])
