"""Processes of vLLM's workers, where an engine has several: one that ended or is stopped ends the engine."""

from __future__ import annotations

from collections.abc import Sequence

from actors.cluster.processes import Process
from rl_backend.contracts import EngineDeadError

# In a row. Debuggers stop a process for moments, too.
_STOPPED_LOOKS = 3


class Workers:
    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._processes: Sequence[Process] = ()
        self._stopped_looks = 0
        self._failure: EngineDeadError | None = None

    def watch(self, processes: Sequence[Process]) -> None:
        self._processes = processes

    def check(self) -> None:
        """To be called at every heartbeat; raises :class:`EngineDeadError` for the engine once a worker is lost."""
        if self._failure is not None:
            raise self._failure
        ended = [process.pid for process in self._processes if process.has_ended]
        stopped = [process.pid for process in self._processes if process.is_stopped]
        self._stopped_looks = self._stopped_looks + 1 if stopped else 0
        if not ended and self._stopped_looks < _STOPPED_LOOKS:
            return
        # The others wait for it in their collectives, and a stopped one would continue one day.
        for process in self._processes:
            process.kill()
        how, pid = ("ended", ended[0]) if ended else ("is stopped", stopped[0])
        self._failure = EngineDeadError(
            f"{self._engine} is dead: its worker process {pid} {how}; restart it", engine=self._engine, hung=not ended
        )
        raise self._failure
