"""Heartbeats of a group's engines: whether their processes live is known within seconds, whatever vLLM is doing there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.cluster.processes import Process, call_on_node
from actors.rollout.group.calls import outcome_of
from actors.rollout.group.engines import EngineSet, engine_name
from actors.rollout.messages import STOPPED_LOOKS, EngineInfo
from actors.wire.segment import host_identity
from rl_backend.contracts import EngineDeadError, RLBackendError

# The end of a process is found by the beat after it and read at the next: within two of them.
BEAT_SECONDS = 0.5
# Without an answer to a beat for so many more, the process is looked at; it is dead when it was seen stopped at
# STOPPED_LOOKS. A busy process is late as well, and is not stopped.
LATE_BEATS = 4


@dataclass
class _Beat:
    actor: Any
    call: Any
    late: int = 0
    stopped: int = 0
    # A look at a process on another node, which a task there takes.
    look: Any = field(default=None, compare=False)


class Heartbeats:
    """The last beat of every engine that serves, or waits for weights. Engines that are found dead are noted in the set."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._beats: dict[int, _Beat] = {}

    def beat(self) -> None:
        """Reads the answers to the last beat, and sends the next; to be called every :data:`BEAT_SECONDS`."""
        for engine, actor in self._engines.living(pushable=True, required=False).items():
            beat = self._beats.get(engine)
            error: Any = None
            if beat is not None and beat.actor is actor:
                if not ray.wait([beat.call], num_returns=1, timeout=0)[0]:
                    self._be_late(engine, beat)
                    continue
                error = outcome_of(beat.call, engine_name(engine))
            if isinstance(error, RLBackendError):
                self._engines.note(engine, error, actor)
            else:
                pulse = actor.pulse.options(concurrency_group="pulse")
                self._beats[engine] = _Beat(actor, pulse.remote())

    def _be_late(self, engine: int, beat: _Beat) -> None:
        # In beats of this process, and not by a clock: where this process stood still itself, no engine is late.
        beat.late += 1
        if beat.late < LATE_BEATS:
            return
        info, limit = self._engines.infos[engine], self._engines.config.heartbeat_timeout
        beat.stopped = beat.stopped + 1 if self._is_stopped(info, beat) else 0
        if beat.stopped >= STOPPED_LOOKS:
            problem = f"its process {info.pid} has been stopped (SIGSTOP, or a debugger)"
        elif beat.late * BEAT_SECONDS >= limit:
            problem = (
                f"its process {info.pid} has not answered a heartbeat for {limit:g} s (RolloutConfig.heartbeat_timeout)"
            )
        else:
            return
        name = engine_name(engine)
        error = EngineDeadError(f"{name} is dead: {problem} and is ended; restart it", engine=name, hung=True)
        self._engines.note(engine, error, beat.actor)
        # Ray asks a process to end, which a stopped one does not hear before it continues.
        process = Process(info.pid, info.started)
        if info.host == host_identity():
            process.kill()
        else:
            call_on_node(info.node_id, Process.kill, process)

    def _is_stopped(self, info: EngineInfo, beat: _Beat) -> bool:
        process = Process(info.pid, info.started)
        if info.host == host_identity():
            return process.is_stopped
        if beat.look is None:
            beat.look = call_on_node(info.node_id, remains_stopped, process)
        if not ray.wait([beat.look], num_returns=1, timeout=0)[0]:
            return False
        found = outcome_of(beat.look, info.name)
        beat.look = None
        if found is True:
            beat.stopped = STOPPED_LOOKS
        return found is True


@contextmanager
def ending_stopped(processes: Sequence[Process]) -> Iterator[None]:
    """Inside, those of these processes of this host that are stopped, and remain so, are ended."""
    left = threading.Event()

    def look(process: Process) -> None:
        stopped = 0
        while stopped < STOPPED_LOOKS:
            if left.wait(BEAT_SECONDS):
                return
            stopped = stopped + 1 if process.is_stopped else 0
        process.kill()

    for process in processes:
        threading.Thread(target=look, args=(process,), name=f"look at process {process.pid}", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def remains_stopped(process: Process, wait: Callable[[float], None] = time.sleep) -> bool:
    """Whether a process of this host is stopped, and is so a while later."""
    for _ in range(STOPPED_LOOKS):
        if not process.is_stopped:
            return False
        wait(BEAT_SECONDS)
    return True
