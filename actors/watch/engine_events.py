"""Events of a run's engines, as metrics and lines of the console."""

import threading
from collections import defaultdict
from typing import Self

from actors.rollout.group.group import RolloutGroup
from actors.rollout.group.healing import EngineEvent
from actors.watch.console import say, warn


class EngineEvents:
    """The events of a group's engines during a run; use as a context manager."""

    def __init__(self, rollout: RolloutGroup, label: str = "") -> None:
        self._rollout, self._label = rollout, label
        self._lock = threading.Lock()
        self._counts = defaultdict[str, float](float)

    def __enter__(self) -> Self:
        self._rollout.healing.listeners.append(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        self._rollout.healing.listeners.remove(self._heard)

    def take(self) -> dict[str, float]:
        """Metrics of the events since the last call, where there were any: ``engines/died``, ``engines/hung``,
        ``engines/dirty``, ``engines/replaced``, and ``engines/seconds_lost`` until replacements served.
        """
        with self._lock:
            counts = dict(self._counts)
            self._counts.clear()
        return {f"engines/{name}": count for name, count in counts.items()}

    def _heard(self, event: EngineEvent) -> None:
        with self._lock:
            self._counts[event.kind] += 1
            if event.seconds:
                self._counts["seconds_lost"] += event.seconds
        if event.kind == "replaced":
            say(f"{self._label}engine {event.engine} was replaced after {event.seconds:.1f} s ({event.reason})")
        else:
            then = "it is started again" if self._rollout.config.max_restarts else "the others go on"
            warn(f"{event.reason}; {then}", self._label)
