"""Reports of pushes: versions, bytes, and seconds of each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from actors.cluster import prometheus
from rl_backend.trace.recorder import span


@dataclass(frozen=True)
class PushReport:
    """What a push did.

    Attributes:
        version: the weight version that every engine of ``engines`` now serves.
        nbytes: bytes of the weights.
        seconds: of each phase: ``plan``, ``stage``, ``verify``, ``load``, ``resume`` (``stream`` in place of
            ``stage``, ``verify`` and ``load`` where weights are streamed), and ``total``. Through shared memory,
            ``stage`` is also the time in which engines check what is staged already, and ``verify`` what is left of
            that. Where turns of episodes have been asked for, ``turns`` is the time until those in flight had ended
            or paused. A LoRA tenant has ``stage``, ``load`` with all checks, ``probe`` and ``switch``.
        transport: the one used; of a tenant ``shared_memory``, ``object_store`` or ``directory``.
        engines: numbers of the engines that were updated.
        skipped: engines that were dead or dirty before the push began.
        sent: bytes that each rank sent to each engine, or through shared memory wrote for all of them; empty between
            GPUs and of a LoRA tenant.
        received: bytes of the weights that each worker of an engine was sent, the same of all engines; one number where
            engines take whole tensors. Empty where ``sent`` is.
        changed: elements that were sent as changed; None where all were sent.
    """

    version: int
    nbytes: int
    seconds: dict[str, float]
    transport: str
    engines: tuple[int, ...]
    skipped: tuple[int, ...]
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    changed: int | None = None

    def export(self) -> None:
        for phase, seconds in self.seconds.items():
            prometheus.observe("rl_backend_push_seconds", seconds, phase=phase, transport=self.transport)
        prometheus.count("rl_backend_pushes_total", 1, transport=self.transport)
        prometheus.count("rl_backend_push_bytes_total", self.nbytes, transport=self.transport)
        for rank, nbytes in enumerate(self.sent):
            prometheus.count("rl_backend_push_rank_bytes_total", nbytes, transport=self.transport, rank=str(rank))


class PushClock:
    """Seconds of a push by phase, which a trace shows as well, with the version once it is known; and bytes by rank
    and by worker, and changed elements.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.sent: tuple[int, ...] = ()
        self.received: tuple[int, ...] = ()
        self.changed: int | None = None
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with span(name, "push") as traced:
            try:
                yield
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
                if self.version is not None:
                    traced.update(weight_version=self.version)

    def seconds(self) -> dict[str, float]:
        return {**self._seconds, "total": time.perf_counter() - self._started}
