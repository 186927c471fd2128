"""The Ray session of a run: joined or started, watched while it lasts, and ended in order by SIGTERM.

Schedulers and ``ray job stop`` end a run with SIGTERM. Ray that is started here is out of reach of other machines, and in
process groups of its own: a terminal, ``timeout`` and some schedulers send a signal to the whole group of a command, and
Ray's servers, which block Ctrl-C, end on SIGTERM, and with them the step that a run would still finish.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import ray
import torch
from ray._private import ray_constants, services
from ray.exceptions import RayError

from actors.cluster.placement import usable_cores
from actors.cluster.processes import driver_mark
from actors.cluster.ray_watch import ray_is_usable, watch_cluster
from rl_backend.contracts import ClusterLostError, ConfigError

logger = logging.getLogger(__name__)

DRIVER = "RL_BACKEND_DRIVER"
"""A variable that names the driver to every process of a Ray that it has started."""

# As of any program that SIGTERM ends.
EXIT_TERMINATED = 128 + signal.SIGTERM
# Who sends a signal to a process and to its group sends it twice; that must not cut the clean-up short.
_REPEATED_SECONDS = 10.0
_PRESTART = "RAY_prestart_worker_first_driver"
_PAUSES = (2.0, 8.0)
"""Before Ray is started here a second and a third time, in seconds."""


@contextmanager
def ray_session(ranks: int, engines: int = 0) -> Iterator[None]:
    """Connects to the cluster of ``RAY_ADDRESS``, or starts Ray here for that many training ranks and engines.

    Within the session SIGTERM raises :class:`RunTerminated`.

    Raises:
        ConfigError: no cluster answers at ``RAY_ADDRESS``, or it refuses this process's token.
        ClusterLostError: Ray's servers ended meanwhile; see :func:`~actors.cluster.ray_watch.watch_cluster`.
    """
    if ray.is_initialized():
        with raised_on_sigterm():
            yield
        return
    try:
        _start_or_join(ranks, engines)
    except SystemExit as error:
        if error.code == signal.SIGTERM:  # Ray's own answer to it, from the beginning of ray.init
            raise RunTerminated from None
        raise
    with raised_on_sigterm():
        try:
            with watch_cluster():
                yield
        finally:
            if ray_is_usable():
                ray.shutdown()


def _start_or_join(ranks: int, engines: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" in os.environ:
        try:
            join_ray(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, ConnectionError, RuntimeError) as error:
            raise ConfigError.of(
                "RAY_ADDRESS",
                os.environ["RAY_ADDRESS"],
                f"{error}; check that it is the head node's HOST:PORT, and that this process has the cluster's token "
                "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)",
            ) from None
    else:
        # Enough CPUs for ranks and engines to reserve all cores each: training and sampling take turns.
        _start_patiently(
            num_cpus=max(usable_cores(), ranks) + max(usable_cores(), engines),
            num_gpus=torch.cuda.device_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


def _start_patiently(**options: Any) -> None:
    """Starts Ray here, again where that fails: a machine that is busy, or a port that another process has just taken."""
    for attempt, pause in enumerate((*_PAUSES, 0.0), start=1):
        try:
            init_local_ray(**options)
            break
        except Exception as error:
            ray.shutdown()
            problem = f"Ray could not be started on this machine: {type(error).__name__}: {error}"
            if not pause:
                raise ClusterLostError(
                    f"{problem}, {attempt} times; see the logs in /tmp/ray/session_latest/logs, and that memory, ports, "
                    "file descriptors and the disk of /tmp are free",
                    reason=str(error),
                ) from error
            logger.warning("%s; it is tried again in %g s", problem, pause)
            time.sleep(pause)


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Inside, each process that Ray starts gets a group of its own, and passes it on to those that it starts."""
    # They stay in the driver's session, and still end when the driver ends: the kernel sees to that, not the group.
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def init_local_ray(**options: Any) -> None:
    """``ray.init(address="local", **options)``, where Ray and its processes listen only on the loopback address.

    Workers have this process's priority, unless ``RAY_worker_niceness`` says otherwise.
    """
    # Ray's own is 15: beside other programs a run gets what they leave.
    os.environ.setdefault(ray_constants.RAY_WORKER_NICENESS, "0")
    # As many workers as there are CPUs: ranks and engines have environments of their own and take none of them.
    os.environ.setdefault(_PRESTART, "0")
    # For the watcher of a run. What this process starts otherwise, such as a program of the user's, does not have it.
    before, os.environ[DRIVER] = os.environ.get(DRIVER), driver_mark()
    try:
        # By itself Ray binds to all interfaces of the machine, and its metrics can be read there without a token.
        with _one_machine(), own_process_groups():
            ray.init(address="local", **options)
    finally:
        del os.environ[DRIVER]
        if before is not None:
            os.environ[DRIVER] = before


def join_ray(address: str, **options: Any) -> None:
    """``ray.init(address=address, **options)``, even if :func:`init_local_ray` of another process started that Ray."""
    # Ray takes a loopback address for this machine's address in the network, where such a Ray does not answer.
    with _one_machine() if _on_loopback_alone(address) else nullcontext():
        ray.init(address=address, **options)


def _on_loopback_alone(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        return False
    return _answers(host, int(port)) and not _answers(ray.util.get_node_ip_address(), int(port))


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _one_machine() -> Iterator[None]:
    # Ray's own switch, which it sets on macOS and Windows. RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 sets it too, but before
    # Ray is imported alone, and to a node address of 127.0.0.1 Ray prefers the machine's.
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters


class RunStopped(KeyboardInterrupt):
    """A run was asked to end, and how far it came. ``except Exception`` lets it pass."""


class RunTerminated(RunStopped):
    """This process got SIGTERM. What ends a run on Ctrl-C ends it on this too."""

    def __init__(self, how: str = "") -> None:
        super().__init__(f"SIGTERM {how}".rstrip())


@contextmanager
def raised_on_sigterm() -> Iterator[None]:
    """SIGTERM raises :class:`RunTerminated` in the main thread, and so does what comes of it; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # After ray.init, which has SIGTERM raise a SystemExit that nothing tells from a reward function's own.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except BaseException as error:
        if (terminated := termination()) is not None and not isinstance(error, RunTerminated):
            raise terminated from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if before is not _terminate:
            _received.clear()


def termination() -> RunTerminated | None:
    """The reason to end a run that got SIGTERM; None without one. Calls into Ray raise a plain KeyboardInterrupt then."""
    return RunTerminated() if _received else None


def raise_if_terminated() -> None:
    """Raises :class:`RunTerminated` again after code of the user, which may have caught it."""
    if _received:
        raise RunTerminated


_received: list[float] = []


def _terminate(_: int, __: FrameType | None) -> None:
    now = time.monotonic()
    repeated = bool(_received) and now - _received[-1] < _REPEATED_SECONDS
    if not repeated:
        _received.append(now)
        raise RunTerminated
