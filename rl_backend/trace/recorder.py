"""Records spans of time of this process in a ring buffer, until they are taken."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
    now: int
    events: list[Event]
    dropped: int


class TraceRecorder:
    """A ring of events. One thread may take them while others record."""

    def __init__(self) -> None:
        self.recording = False
        self._lock = threading.RLock()
        self._events: deque[Event] = deque()
        self._unfinished: deque[Callable[[], Event | None]] = deque()
        self._threads: dict[int, int] = {}
        self._dropped = 0

    def start(self, capacity: int = CAPACITY) -> None:
        with self._lock:
            if not self.recording:
                self.recording, self._events, self._dropped = True, deque(maxlen=capacity), 0

    def stop(self) -> None:
        """Ends recording and forgets what was not taken."""
        with self._lock:
            self.recording = False
            for kept in (self._events, self._unfinished, self._threads):
                kept.clear()

    @contextmanager
    def span(self, name: str, category: str, **arguments: Argument) -> Generator[dict[str, Argument]]:
        """Records its body, to which it gives ``arguments`` to add others; an error that leaves it is named in ``error``.

        Args:
            category: one of :data:`CATEGORIES`.
            arguments: shown with the event; ``weight_version`` makes the arrows from pushes to rollouts.
        """
        if not self.recording:
            yield arguments
            return
        start = time.monotonic_ns()
        try:
            yield arguments
        except BaseException as error:
            arguments["error"] = type(error).__name__
            raise
        finally:
            self.add(name, category, start, time.monotonic_ns(), arguments)

    def add(self, name: str, category: str, start: int, end: int, arguments: dict[str, Argument]) -> None:
        """Records a span that has ended; times are nanoseconds of ``time.monotonic_ns``."""
        with self._lock:
            if self.recording:
                self._append(self._events, Event(name, category, start, end - start, self.thread, arguments))

    def add_when_known(self, resolve: Callable[[], Event | None]) -> None:
        """Records a span whose times are not known yet, as on a GPU; ``resolve`` returns None until they are."""
        with self._lock:
            if self.recording:
                self._append(self._unfinished, resolve)

    @property
    def thread(self) -> int:
        with self._lock:
            return self._threads.setdefault(threading.get_ident(), len(self._threads))

    def take(self) -> list[Event]:
        """Removes and returns the events recorded so far, in the order in which they ended."""
        with self._lock:
            # From the front alone, so that spans of a device stay in the order in which they were recorded.
            while self._unfinished and (resolved := self._unfinished[0]()) is not None:
                self._unfinished.popleft()
                self._append(self._events, resolved)
            events = list(self._events)
            self._events.clear()
            return events

    def take_batch(self, *, stop: bool = False) -> TraceBatch:
        """:meth:`take`, ready to travel to another process. Starts recording if that is off, or ends it with ``stop``."""
        with self._lock:
            self.start()
            events, dropped, self._dropped = self.take(), self._dropped, 0
            if stop:
                self.stop()
            return TraceBatch(clock_identity(), time.monotonic_ns(), events, dropped)

    def _append[T](self, ring: deque[T], item: T) -> None:
        # By hand: a deque with maxlen drops without counting.
        if len(ring) == self._events.maxlen:
            ring.popleft()
            self._dropped += 1
        ring.append(item)


recorder = TraceRecorder()
"""This process's."""

span = recorder.span


def clock_identity() -> str:
    """Names the monotonic clock of this process: that of one boot of one kernel, in one time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = ""
    with suppress(OSError):  # kernels before 5.6 have one clock for all
        namespace = str(Path("/proc/self/ns/time").readlink())
    return f"{boot} {namespace}".strip()
