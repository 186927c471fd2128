"""Times of the phases of a step."""

from __future__ import annotations

import time

from rl_backend.trace.recorder import recorder


class Clock:
    """Seconds of each phase of a step, as the metrics ``seconds/<phase>`` and, when a trace is recorded, as its events.

    Attributes:
        seconds: these metrics.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._last = time.monotonic_ns()

    def lap(self, phase: str, tokens: int = 0) -> None:
        """Ends ``phase``, which began with the lap before or with the clock. Times of a repeated phase add up.

        Args:
            tokens: that it has worked on.
        """
        now = time.monotonic_ns()
        name = f"seconds/{phase}"
        self.seconds[name] = self.seconds.get(name, 0.0) + (now - self._last) / 1e9
        if tokens:
            self._tokens[phase] = self._tokens.get(phase, 0) + tokens
        recorder.add(phase, "phase", self._last, now, {})
        self._last = now

    @property
    def rates(self) -> dict[str, float]:
        """The metrics ``tokens_per_second/<phase>`` of phases that worked on tokens."""
        return {
            f"tokens_per_second/{phase}": tokens / seconds
            for phase, tokens in self._tokens.items()
            if (seconds := self.seconds[f"seconds/{phase}"])
        }
