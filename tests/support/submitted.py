"""Samples in the making, for stand-ins of rollout groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread

from actors.rollout.messages import Sample


class Submitted:
    """What ``RolloutGroup.submit`` returns, of samples of so many prompts that a function makes in a thread."""

    def __init__(self, prompts: int, make: Callable[[], Sequence[Sample]]) -> None:
        self._prompts, self._samples = prompts, Future[list[Sample]]()
        Thread(target=self._make, args=(make,), daemon=True).start()

    def result(self, timeout: float | None = None) -> list[Sample]:
        return self._samples.result(10)

    def when_answered(self, call: Callable[[], None]) -> None:
        for _ in range(self._prompts):
            self._samples.add_done_callback(lambda _: call())

    def _make(self, make: Callable[[], Sequence[Sample]]) -> None:
        try:
            self._samples.set_result(list(make()))
        except Exception as error:  # noqa: BLE001 who waits for it gets it
            self._samples.set_exception(error)
