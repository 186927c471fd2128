"""What this process does when: spans of time, kept in a ring until they are taken.

Recording is off until :meth:`TraceRecorder.start`; a span then costs about a microsecond, and before it a function call.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

type Argument = str | int | float | bool | None

CATEGORIES = ("phase", "operation", "micro_batch", "rollout", "push", "weights", "step")
"""``phase``: the driver's part of a step. ``operation``: of a training group, on one rank. ``micro_batch``: forward,
backward (or a pipeline schedule's actions) inside an operation. ``rollout``: an engine samples. ``push``: the driver's view
of a weight push and its phases. ``weights``: an engine's part in one. ``step``: a whole step of the driver's loop."""

CAPACITY = 65536
"""Events that wait to be taken, at most; the oldest are dropped, and counted, beyond it. About 30 MB."""


class Event(NamedTuple):
    """A span of time.

    Attributes:
        start: nanoseconds of this host's monotonic clock.
        duration: nanoseconds.
        thread: number of the thread among those of its process that recorded, from 0.
    """

    name: str
    category: str
    start: int
    duration: int
    thread: int
    arguments: dict[str, Argument]


@dataclass(frozen=True)
class TraceBatch:
    """Events on their way to the process that writes them.

    Attributes:
        clock: equal for processes whose monotonic clocks are one.
        now: of that clock when the batch was taken, nanoseconds.
        dropped: events lost since the batch before because the ring was full.
    """

    clock: str
    pid: int
    now: int
    events: list[Event]
    dropped: int


class Span:
    """Times the body of a ``with`` statement; an error that leaves it is named in the argument ``error``."""

    __slots__ = ("_arguments", "_category", "_name", "_recorder", "_start")

    def __init__(self, recorder: TraceRecorder, name: str, category: str, arguments: dict[str, Argument]) -> None:
        self._recorder = recorder
        self._name = name
        self._category = category
        self._arguments = arguments

    def add(self, **arguments: Argument) -> None:
        """Further arguments, known only inside the body."""
        self._arguments.update(arguments)

    def __enter__(self) -> Self:
        self._start = time.monotonic_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._arguments["error"] = kind.__name__
        self._recorder.add(self._name, self._category, self._start, time.monotonic_ns(), self._arguments)


class _NoSpan(Span):
    """What a recorder that is off hands out."""

    def __init__(self) -> None:
        pass

    def add(self, **arguments: Argument) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


_NO_SPAN = _NoSpan()


class TraceRecorder:
    """A ring of events. One thread may take them while others record."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] | None = None
        self._unfinished: deque[Callable[[], Event | None]] = deque()
        self._threads: dict[int, int] = {}
        self._dropped = 0

    @property
    def recording(self) -> bool:
        return self._events is not None

    def start(self, capacity: int = CAPACITY) -> None:
        """Begins to record; does nothing when it records already."""
        with self._lock:
            if self._events is None:
                self._events, self._dropped = deque(maxlen=capacity), 0

    def stop(self) -> None:
        """Ends recording and forgets what was not taken."""
        with self._lock:
            self._events = None
            self._unfinished.clear()
            self._threads.clear()

    def span(self, name: str, category: str, **arguments: Argument) -> Span:
        """A context manager that records its body.

        Args:
            category: one of :data:`CATEGORIES`.
            arguments: shown with the event; ``weight_version`` makes the arrows from pushes to rollouts.
        """
        return _NO_SPAN if self._events is None else Span(self, name, category, arguments)

    def add(self, name: str, category: str, start: int, end: int, arguments: dict[str, Argument]) -> None:
        """Records a span that has ended; times are nanoseconds of ``time.monotonic_ns``."""
        with self._lock:
            if self._events is not None:
                thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
                self._append(Event(name, category, start, end - start, thread, arguments))

    def add_when_known(self, resolve: Callable[[], Event | None]) -> None:
        """Records a span whose times are not known yet, as on a GPU; ``resolve`` returns None until they are."""
        with self._lock:
            if self._events is None:
                return
            if len(self._unfinished) == self._events.maxlen:
                self._unfinished.popleft()
                self._dropped += 1
            self._unfinished.append(resolve)

    @property
    def thread(self) -> int:
        """Number of the calling thread, as in :class:`Event`."""
        with self._lock:
            return self._threads.setdefault(threading.get_ident(), len(self._threads))

    def take(self) -> list[Event]:
        """Removes and returns the events recorded so far, in the order in which they ended."""
        return self._take()[0]

    def take_batch(self, *, stop: bool = False) -> TraceBatch:
        """:meth:`take`, ready to travel to another process. Starts recording if that is off, or ends it with ``stop``."""
        self.start()
        events, dropped = self._take()
        if stop:
            self.stop()
        return TraceBatch(clock_identity(), os.getpid(), time.monotonic_ns(), events, dropped)

    def _take(self) -> tuple[list[Event], int]:
        with self._lock:
            if self._events is None:
                return [], 0
            while self._unfinished and (resolved := self._unfinished[0]()) is not None:
                self._unfinished.popleft()
                self._append(resolved)
            events, dropped = list(self._events), self._dropped
            self._events.clear()
            self._dropped = 0
            return events, dropped

    def _append(self, event: Event) -> None:
        assert self._events is not None
        self._dropped += len(self._events) == self._events.maxlen
        self._events.append(event)


recorder = TraceRecorder()
"""This process's."""


def span(name: str, category: str, **arguments: Argument) -> Span:
    """:meth:`TraceRecorder.span` of this process's recorder."""
    return recorder.span(name, category, **arguments)


def clock_identity() -> str:
    """Names the monotonic clock of this process: that of one boot of one kernel, in one time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = ""
    with suppress(OSError):  # kernels before 5.6 have one clock for all
        namespace = str(Path("/proc/self/ns/time").readlink())
    return f"{boot} {namespace}".strip()
