"""One trace of a whole run: the driver, every training rank and every engine on one clock, in one Chrome trace file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

import ray
from ray.exceptions import RayError

from rl_backend.contracts import ConfigError
from rl_backend.trace import ChromeTraceWriter, Event, TraceBatch, recorder
from rl_backend.trace.recorder import clock_identity

DRIVER, STEPS_LANE = 1, 0
ROUND_TRIPS = 8
"""Of each actor when tracing begins, to find how far another host's clock is away."""

PROMPT_SECONDS = 0.02
"""How long :meth:`TraceCollector.collect` waits for actors of other hosts, whose answers then measure their clocks again."""

COLLECT_SECONDS = 0.25
"""Shortest time between two collections that steps ask for, so that short steps on many ranks are not slowed by them."""

START_SECONDS, CLOSE_SECONDS = 30.0, 5.0
KEPT_PUSHES = 64


class TraceSource(Protocol):
    """A group of actors; ``TrainGroup`` and ``RolloutGroup`` are two."""

    def trace_actors(self) -> Mapping[str, Any]:
        """Label -> Ray handle of a living actor that has ``take_trace``."""


@dataclass
class _Clock:
    """Another host's monotonic clock minus the driver's, in nanoseconds, and by how much that may be wrong."""

    offset: float
    error: float
    measured: int


@dataclass
class _Lane:
    """One traced process."""

    pid: int
    name: str
    actor: Any
    sent: int = 0
    reference: Any = None
    load: tuple[int, tuple[int, int, float]] | None = None


class TraceCollector:
    """Records this process and the actors of ``sources`` and writes ``path`` as the run goes.

    Every actor keeps its events in a ring until :meth:`collect` asks for them, without waiting for actors that are busy.
    Times are of the monotonic clocks: processes of one host share theirs. The clock of another host is placed by the
    shortest round trip of a call to it, and may be wrong by half of that; the trace's event "clocks of other hosts" says it.

    Args:
        sources: training and rollout groups; engines that are restarted are found again.

    Raises:
        ConfigError: this process is recording another trace already.
    """

    def __init__(self, path: Path | str, sources: Sequence[TraceSource]) -> None:
        if recorder.recording:
            raise ConfigError.of("trace", str(path), "this process records another trace already; close that one first")
        self._sources = tuple(sources)
        self._writer = ChromeTraceWriter(path)
        self._clock = clock_identity()
        self._clocks: dict[str, _Clock] = {}
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._threads: set[tuple[int, int]] = set()
        self._pushes: dict[int, tuple[int, int, float]] = {}
        self._loads: list[tuple[int, tuple[int, int, float]]] = []
        self._arrows = 0
        self._epoch = time.monotonic_ns()
        self._next_collect = 0.0
        self._writer.process(DRIVER, "driver")
        self._writer.thread(DRIVER, STEPS_LANE, "steps")
        began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._writer.instant(DRIVER, "trace begins", "trace", 0.0, {"wall_clock": began})
        recorder.start()
        for _ in range(ROUND_TRIPS):
            self._exchange(START_SECONDS)
        self._label()

    def step(self, step: int, start: int, end: int) -> None:
        """A step of the driver's loop; times are of ``time.monotonic_ns``. Collects when that is due."""
        span = (start - self._epoch) / 1000, (end - start) / 1000
        self._writer.complete(DRIVER, STEPS_LANE, f"step {step}", "step", *span, {"step": step})
        if time.monotonic() >= self._next_collect:
            self.collect()

    def collect(self) -> None:
        """Writes what was recorded since the last call, of busy actors when they answer."""
        self._next_collect = time.monotonic() + COLLECT_SECONDS
        remote = any(clock.error for clock in self._clocks.values())
        self._exchange(PROMPT_SECONDS if remote else 0.0)
        self._write(DRIVER, 0.0, recorder.take())
        self._draw_arrows()
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left, ends the file and stops recording everywhere. A second call does nothing."""
        if not recorder.recording:
            return
        try:
            if ray.is_initialized():
                self._exchange(CLOSE_SECONDS)
                self._exchange(CLOSE_SECONDS, stop=True)
            for lane in self._lanes.values():
                if lane.reference is not None:
                    self._note(lane.pid, "no more events", {"reason": "the process was busy when the trace was closed"})
            self._write(DRIVER, 0.0, recorder.take())
            self._draw_arrows()
        finally:
            recorder.stop()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, timeout: float, *, stop: bool = False) -> None:
        """Asks every actor that is not being asked already, and takes the answers that come within ``timeout`` seconds."""
        self._find_actors()
        for lane in self._lanes.values():
            if lane.reference is None and lane.actor is not None:
                lane.sent = time.monotonic_ns()
                lane.reference = lane.actor.take_trace.remote(stop)
        waiting = {lane.reference: lane for lane in self._lanes.values() if lane.reference is not None}
        deadline = time.monotonic() + timeout
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            received = time.monotonic_ns()
            if not ready:
                return
            lane = waiting.pop(ready[0])
            lane.reference = None
            try:
                self._receive(lane, ray.get(ready[0]), received)
            except RayError as error:
                lane.actor = None
                self._note(lane.pid, "no more events", {"reason": f"{type(error).__name__}: the process ended"})

    def _find_actors(self) -> None:
        for index, source in enumerate(self._sources):
            for label, actor in source.trace_actors().items():
                lane = self._lanes.get((index, label))
                if lane is None:
                    taken = sum(known == label for _, known in self._lanes)
                    name = f"{label} of group {taken + 1}" if taken else label
                    lane = self._lanes[index, label] = _Lane(DRIVER + 1 + len(self._lanes), name, actor)
                    self._writer.process(lane.pid, name)
                elif lane.actor is None or lane.actor._actor_id != actor._actor_id:
                    lane.actor, lane.reference, lane.load = actor, None, None
                    self._note(lane.pid, "another process", {})

    def _receive(self, lane: _Lane, batch: TraceBatch, received: int) -> None:
        if batch.clock != self._clock:
            self._measure(batch, lane.sent, received)
        elif batch.clock not in self._clocks:
            self._clocks[batch.clock] = _Clock(0.0, 0.0, received)
        if batch.dropped:
            self._note(lane.pid, "events dropped", {"events": batch.dropped})
        self._write(lane.pid, self._clocks[batch.clock].offset, batch.events, lane)

    def _measure(self, batch: TraceBatch, sent: int, received: int) -> None:
        found = _Clock(batch.now - (sent + received) / 2, (received - sent) / 2, received)
        known = self._clocks.get(batch.clock)
        # Clocks drift apart by up to about 50 parts in a million, so that an old measurement is worth less every second.
        if known is None or found.error <= known.error + 50e-6 * (received - known.measured):
            self._clocks[batch.clock] = found

    def _label(self) -> None:
        """Says in the trace how exact the times of other hosts are."""
        others = [clock for clock in self._clocks.values() if clock.error]
        if others:
            worst = max(clock.error for clock in others) / 1e6
            self._note(DRIVER, "clocks of other hosts", {"hosts": len(others), "error_ms": round(worst, 3)})

    def _write(self, pid: int, offset: float, events: Sequence[Event], lane: _Lane | None = None) -> None:
        for event in events:
            start, tid = (event.start - offset - self._epoch) / 1000, event.thread + 1
            if (pid, tid) not in self._threads:
                self._threads.add((pid, tid))
                self._writer.thread(pid, tid, "main" if tid == 1 else f"thread {tid}")
            self._writer.complete(pid, tid, event.name, event.category, start, event.duration / 1000, event.arguments)
            version = event.arguments.get("weight_version")
            if isinstance(version, int) and "error" not in event.arguments:
                self._follow(lane, event, version, (pid, tid, start), (pid, tid, start + event.duration / 2000))

    def _follow(
        self, lane: _Lane | None, event: Event, version: int, start: tuple[int, int, float], middle: tuple[int, int, float]
    ) -> None:
        """Remembers where a weight version is pushed and loaded, for the arrows to the rollouts that use it."""
        if lane is None:
            if event.category == "push" and event.name in ("load", "stream"):
                self._pushes[version] = start
                while len(self._pushes) > KEPT_PUSHES:
                    self._pushes.pop(next(iter(self._pushes)))
        elif event.category == "weights" and event.name == "finish update":
            lane.load = version, middle
            self._loads.append((version, middle))
        elif event.category == "rollout" and lane.load is not None and lane.load[0] == version:
            self._draw(version, lane.load[1], start)

    def _draw_arrows(self) -> None:
        """From pushes to loads, once both are known."""
        later = []
        for version, load in self._loads:
            if version in self._pushes:
                self._draw(version, self._pushes[version], load)
            else:
                later.append((version, load))
        self._loads = later[-KEPT_PUSHES:]

    def _draw(self, version: int, start: tuple[int, int, float], end: tuple[int, int, float]) -> None:
        self._arrows += 1
        self._writer.arrow(self._arrows, f"weights {version}", "weights", start, end)

    def _note(self, pid: int, name: str, arguments: Mapping[str, Any]) -> None:
        self._writer.instant(pid, name, "trace", (time.monotonic_ns() - self._epoch) / 1000, arguments)
