"""Where the time of a step goes."""

from __future__ import annotations

import time

from rl_backend.trace import recorder


class Clock:
    """Seconds of each phase of a step, as the metrics ``seconds/<phase>`` and, when a trace is recorded, as its events."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic_ns()

    def lap(self, phase: str) -> None:
        """Ends ``phase``, which began with the lap before or with the clock. A phase that comes again adds up."""
        now = time.monotonic_ns()
        name = f"seconds/{phase}"
        self.seconds[name] = self.seconds.get(name, 0.0) + (now - self._last) / 1e9
        recorder.add(phase, "phase", self._last, now, {})
        self._last = now
