"""The end of a run between two of its steps, which SIGTERM and Ctrl-C ask for."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Literal

from actors.cluster.ray_watch import cluster_loss
from actors.cluster.session import RunStopped, RunTerminated

type Reason = Literal["Ctrl-C", "SIGTERM"]

_REASONS: dict[int, Reason] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

# Within so many seconds a second signal is the same one, sent to a process and to its group or passed on by a program.
_SAME_SECONDS: dict[int, float] = {signal.SIGINT: 0.3, signal.SIGTERM: 10.0}


class StopRequest:
    """Asks runs to end after the step that each is in. Runs of several threads may share one.

    Attributes:
        insisted: asked again, so that nothing more is waited for.
    """

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.insisted = False
        self._asked = 0.0

    def ask(self, reason: Reason) -> None:
        if self.reason is None:
            self.reason, self._asked = reason, time.monotonic()

    def stopped(self, how: str) -> RunStopped:
        return RunTerminated(how) if self.reason == "SIGTERM" else RunStopped(f"Ctrl-C {how}")

    @contextmanager
    def on_signals(self, answer: str) -> Iterator[None]:
        """Inside, the first SIGTERM or Ctrl-C asks, and prints ``answer``; another one does what it did before.

        A signal that is ignored stays so, and outside of the main thread nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in _REASONS}
        before = {number: handler for number, handler in handlers.items() if callable(handler)}

        def received(number: int, frame: FrameType | None) -> None:
            lost = number == signal.SIGINT and cluster_loss() is not None  # the watch over Ray tells of it by this signal
            if self.reason is None and not lost:
                self.ask(_REASONS[number])
                again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
                # Not print: the signal may have come in the middle of one. Who reads it may have left, by the same Ctrl-C.
                with suppress(OSError):
                    os.write(2, f"\n{self.reason}: {answer}{again}\n".encode())
            elif lost or time.monotonic() - self._asked > _SAME_SECONDS[number]:
                self.insisted = not lost
                before[number](number, frame)

        for number in before:
            signal.signal(number, received)
        try:
            yield
        except Exception as error:
            if self.reason is None:
                raise
            # Most likely due to the signal, where that went to Ray's processes as well.
            raise self.stopped(f"before the step was finished: {type(error).__name__}: {error}") from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
