"""One trace of a whole run: the driver, every training rank and every engine on one clock, in one Chrome trace file."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

import ray
from ray.exceptions import RayError, RayTaskError

from actors.cluster.ray_watch import ray_is_usable
from rl_backend.contracts import ConfigError
from rl_backend.trace.chrome import ChromeTraceWriter
from rl_backend.trace.recorder import Event, TraceBatch, clock_identity, recorder

DRIVER, STEPS_LANE = 1, 0
ROUND_TRIPS = 8
"""Of each actor when tracing begins, to find how far another host's clock is away."""

PROMPT_SECONDS = 0.02
"""How long :meth:`TraceCollector.collect` waits for actors of other hosts, whose answers then measure their clocks again."""

COLLECT_SECONDS = 0.25
"""Shortest time between two collections that steps ask for, so that short steps on many ranks are not slowed by them."""

START_SECONDS, CLOSE_SECONDS = 30.0, 5.0
"""Longest time that the beginning and the end of a trace wait for actors, over all of them."""

# Engines load a push soon after it: arrows between them need no older ones.
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
    elsewhere: bool = True
    sent: int = 0
    reference: Any = None
    load: tuple[int, tuple[int, int, float]] | None = None


class TraceCollector:
    """Records this process and the actors of ``sources`` and writes ``path`` as the run goes.

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
        # Processes of one host share a monotonic clock. Another host's is placed by the shortest round trip of a call to it,
        # and may be wrong by half of that, which the trace says.
        self._clock = clock_identity()
        self._clocks: dict[str, _Clock] = {}
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._failed: set[Any] = set()
        self._threads: set[tuple[int, int]] = set()
        self._pushes: dict[int, tuple[int, int, float]] = {}
        self._loads: list[tuple[int, tuple[int, int, float]]] = []
        self._arrows = 0
        self._epoch = time.monotonic_ns()
        self._next_collect = 0.0
        try:
            self._writer.process(DRIVER, "driver")
            self._writer.thread(DRIVER, STEPS_LANE, "steps")
            began = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._writer.instant(DRIVER, "trace begins", "trace", 0.0, {"wall_clock": began})
            recorder.start()
            deadline = time.monotonic() + START_SECONDS
            for _ in range(ROUND_TRIPS):
                self._exchange(deadline - time.monotonic())
            self._label()
        except BaseException:
            recorder.stop()
            self._writer.close()
            raise

    def step(self, step: int, start: int, end: int) -> None:
        """A step of the driver's loop, in ``time.monotonic_ns``. Collects when that is due."""
        span = (start - self._epoch) / 1000, (end - start) / 1000
        self._writer.complete(DRIVER, STEPS_LANE, f"step {step}", "step", *span, {"step": step})
        if time.monotonic() >= self._next_collect:
            self.collect()

    def collect(self) -> None:
        """Writes what was recorded since the last call; waits for no busy actor of this host."""
        started = time.monotonic()
        self._exchange(PROMPT_SECONDS)
        self._write(DRIVER, 0.0, recorder.take())
        self._draw_arrows()
        self._writer.flush()
        ended = time.monotonic()
        # Spend at most 2% of the run on collecting.
        self._next_collect = ended + max(COLLECT_SECONDS, 50 * (ended - started))

    def close(self) -> None:
        """Writes what is left, ends the file and stops recording everywhere. A second call does nothing."""
        if not recorder.recording:
            return
        try:
            if ray_is_usable():
                self._stop_actors()
            self._write(DRIVER, 0.0, recorder.take())
            self._draw_arrows()
        finally:
            recorder.stop()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, timeout: float) -> None:
        self._find_actors()
        for lane in self._lanes.values():
            if lane.reference is None and lane.actor is not None:
                lane.sent = time.monotonic_ns()
                lane.reference = lane.actor.take_trace.remote(False)
        deadline = time.monotonic() + timeout
        waiting = self._asked()
        self._take(waiting, len(waiting), 0.0)
        # Answers of other hosts are taken one by one, because the time of each measures a clock.
        waiting = {reference: lane for reference, lane in waiting.items() if lane.elsewhere}
        while waiting and (left := deadline - time.monotonic()) > 0:
            self._take(waiting, 1, left)

    def _stop_actors(self) -> None:
        """Ends recording in every actor, in busy ones once they are done, and takes the answers that come in time."""
        waiting = self._asked()
        for lane in self._lanes.values():
            if lane.actor is not None:
                lane.sent = lane.sent if lane.reference is not None else time.monotonic_ns()
                waiting[lane.actor.take_trace.remote(True)] = lane
        self._take(waiting, len(waiting), CLOSE_SECONDS)
        for pid in sorted({lane.pid for lane in waiting.values()}):
            self._note(pid, "no more events", {"reason": "the process was busy when the trace was closed"})

    def _asked(self) -> dict[Any, _Lane]:
        return {lane.reference: lane for lane in self._lanes.values() if lane.reference is not None}

    def _take(self, waiting: dict[Any, _Lane], count: int, timeout: float) -> None:
        """Removes the answers that come within ``timeout`` seconds, or ``count`` of them, from ``waiting``."""
        if not waiting:
            return
        ready, _ = ray.wait(list(waiting), num_returns=count, timeout=timeout)
        received = time.monotonic_ns()
        for reference in ready:
            lane = waiting.pop(reference)
            lane.reference = None
            try:
                self._receive(lane, ray.get(reference), received)
            except RayError as error:
                self._give_up(lane, error)

    def _give_up(self, lane: _Lane, error: RayError) -> None:
        if lane.actor is not None:
            self._failed.add(lane.actor._actor_id)
            lane.actor = None
            cause = error.cause if isinstance(error, RayTaskError) else error
            reason = f"{type(cause).__name__}: {str(cause).partition('\n')[0]}"
            self._note(lane.pid, "no more events", {"reason": reason})

    def _find_actors(self) -> None:
        for index, source in enumerate(self._sources):
            for label, actor in source.trace_actors().items():
                if actor._actor_id in self._failed:
                    continue
                lane = self._lanes.get((index, label))
                if lane is None:
                    taken = sum(known == label for _, known in self._lanes)
                    name = f"{label} of group {taken + 1}" if taken else label
                    lane = self._lanes[index, label] = _Lane(DRIVER + 1 + len(self._lanes), name, actor)
                    self._writer.process(lane.pid, name)
                elif lane.actor is None or lane.actor._actor_id != actor._actor_id:
                    lane.actor, lane.elsewhere, lane.reference, lane.load = actor, True, None, None
                    self._note(lane.pid, "another process", {})

    def _receive(self, lane: _Lane, batch: TraceBatch, received: int) -> None:
        lane.elsewhere = batch.clock != self._clock
        if lane.elsewhere:
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
        others = [clock for clock in self._clocks.values() if clock.error]
        if others:
            worst = max(clock.error for clock in others) / 1e6
            self._note(DRIVER, "clocks of other hosts", {"hosts": len(others), "error_ms": round(worst, 3)})

    def _write(self, pid: int, offset: float, events: Sequence[Event], lane: _Lane | None = None) -> None:
        for event in events:
            start, tid = (event.start - offset - self._epoch) / 1000, event.thread + 1
            if start < 0:  # of a trace before, whose end an actor was too busy to hear of
                continue
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
