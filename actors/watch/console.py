"""Console output of a run: the phases of its start, and a line per step with the time that is left.

Nothing here takes long to import: the first line of a command comes before PyTorch and Ray are imported.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

COLUMNS = 100

SHOWN = {
    "reward": ("reward", ".3f"),
    "held_out_reward": ("held-out reward", ".3f"),
    "nll": ("nll", ".3f"),
    "held_out_nll": ("held-out nll", ".3f"),
    "answer_probability": ("answer probability", ".3f"),
    "log_prob_gap": ("gap", ".1e"),
    "grad_norm": ("grad norm", ".2f"),
    "entropy": ("entropy", ".2f"),
    "equal_groups": ("equal groups", ".0%"),
    "kl": ("kl", ".3f"),
    "responses_cut_off": ("cut off", ".0%"),
    "value_loss": ("value loss", ".3f"),
    "staleness_mean": ("staleness", ".1f"),
    "tokens_per_second/train": ("train tokens/s", ".0f"),
    "peak_memory_gib": ("memory GiB", ".2f"),
    "next_lr": ("next lr", ".1e"),
}
"""Metrics in the line of a step: label and format. A line without room for all leaves out the last."""

_LINE_SECONDS = 1.0
_LONGEST_AVERAGE = 20
_BEGUN_SECONDS, _STILL_SECONDS = 2.0, 60.0

_CLEAR = "\r\x1b[K"

_printing = threading.RLock()
_live: list[_Phase] = []
_command_began: list[float] = []


def announce(module: str) -> None:
    """Prints the first line of a command, to standard error, and notes when it began.

    Call it with ``__name__`` in a script, before the imports that take seconds; a module that is imported prints nothing.
    """
    if module == "__main__":
        _command_began[:] = [time.monotonic()]
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        program = Path(sys.argv[0]).stem if spec is None else spec.name.removesuffix(".__main__")
        sys.stderr.write(f"{program}: importing PyTorch and Ray, which takes some seconds\n")
        sys.stderr.flush()


def command_began(*, take: bool = False) -> float:
    """When the announced command began, or else now, by ``time.monotonic``; with ``take`` for its first run alone."""
    if not _command_began:
        return time.monotonic()
    return _command_began.pop() if take else _command_began[0]


def say(line: str) -> None:
    """Prints a line, also while a terminal shows a phase that lasts."""
    with _printing:
        live = _live and _on_terminal()
        try:
            sys.stdout.write(f"{_CLEAR if live else ''}{line}\n")
            if live:
                _live[0].draw()
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of a pipe has left, such as ``tee`` by the Ctrl-C that a run saves itself after. Lines are lost from
            # now on (also those in the buffer, which would be refused again), and the run goes on: its folder has them.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(problem: str, label: str = "") -> None:
    say(f"{label}warning: {problem}")


def say_facts(title: str, facts: Iterable[str]) -> None:
    """Prints ``title: fact, fact, ...`` in as many lines as it takes; a fact is never divided."""
    line, lines = f"{title}:", []
    for fact in facts:
        if len(line) + len(fact) + 2 > _columns() and not line.endswith(":"):
            lines.append(line)
            line = "   "
        line += f" {fact},"
    say("\n".join([*lines, line.rstrip(",:")]))


class Phases:
    """The phases of a start, each with what it waits for and its time; a start that ``began`` at None began with the
    command.
    """

    def __init__(self, label: str = "", began: float | None = None) -> None:
        self.began = command_began() if began is None else began
        self._label = label

    @contextmanager
    def phase(self, name: str, waits_for: str) -> Iterator[None]:
        phase = _Phase(self._label, name, waits_for, self.began)
        with phase.shown():
            yield


class _Phase:
    def __init__(self, label: str, name: str, waits_for: str, began: float) -> None:
        self._label, self._name, self._waits_for, self._start = label, name, waits_for, began
        self._began = time.monotonic()

    def draw(self) -> None:
        text = self._line(f"{self._waits_for} ... {time.monotonic() - self._began:.0f}s")
        sys.stdout.write(f"{_CLEAR}{text[: _columns() - 1]}")
        sys.stdout.flush()

    @contextmanager
    def shown(self) -> Iterator[None]:
        ended = threading.Event()
        terminal = _on_terminal()
        with _printing:
            first = terminal and not _live
            if first:
                _live.append(self)
                self.draw()
        thread = threading.Thread(target=self._follow, args=(ended, first), name=f"phase {self._name}", daemon=True)
        thread.start()
        how = "stopped after "
        try:
            yield
            how = ""
        except Exception:
            how = "failed after "
            raise
        finally:
            ended.set()
            thread.join()
            with _printing:
                if first:
                    _live.remove(self)
                    sys.stdout.write(_CLEAR)
                say(self._line(f"{self._waits_for}: {how}{time.monotonic() - self._began:.1f} s"))

    def _follow(self, ended: threading.Event, live: bool) -> None:
        # A terminal's line counts seconds. A log gets a line when a phase has lasted two seconds, then one every minute.
        wait = 1.0 if live else _BEGUN_SECONDS
        while not ended.wait(wait):
            with _printing:
                if live:
                    self.draw()
                else:
                    waited = time.monotonic() - self._began
                    say(self._line(f"{self._waits_for} ..." + (f" {_clock(waited)}" if wait == _STILL_SECONDS else "")))
                    wait = _STILL_SECONDS

    def _line(self, text: str) -> str:
        return f"{self._label}{time.monotonic() - self._start:7.1f} s  {self._name:<10} {text}"


class StepLines:
    """A line for each step: elapsed time since the run ``began``, time left, the longest phase, metrics."""

    def __init__(self, steps: int, began: float, label: str = "") -> None:
        self._steps, self._began, self._label = steps, began, label
        self._last = self._printed = time.monotonic()
        self._durations: deque[float] = deque(maxlen=_LONGEST_AVERAGE)
        self._count = 0

    def begin(self) -> None:
        self._last = time.monotonic()

    def end(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """A step has ended, with ``seconds`` of its phases by ``seconds/<phase>``."""
        now = time.monotonic()
        took, self._last = now - self._last, now
        self._count += 1
        if self._count == 2:
            self._durations.clear()  # a first step is longer than others
        self._durations.append(took)
        skipped = metrics.get("step_ok", 1) != 1
        evaluated = any(name.startswith("held_out") for name in metrics)
        # A log of steps that take milliseconds would be all that anybody sees.
        if self._count > 1 and step < self._steps and now - self._printed < _LINE_SECONDS and not skipped and not evaluated:
            return
        self._printed = now
        left = (self._steps - step) * sum(self._durations) / len(self._durations)
        line = f"{self._label}step {step:4d}/{self._steps}  {_clock(now - self._began)}, {_clock(left)} left"
        if skipped:
            line += "  UPDATE SKIPPED: a gradient is not finite"
        for part in self._parts(took, metrics, seconds):
            if len(line) + len(part) + 2 > _columns():
                break
            line += f"  {part}"
        say(line)

    @staticmethod
    def _parts(took: float, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> Iterator[str]:
        phase = max(seconds, key=lambda name: seconds[name], default="")
        share = f" ({phase.removeprefix('seconds/')} {min(seconds[phase] / max(took, 1e-9), 1):.0%})" if phase else ""
        yield f"{took:.1f}s{share}"
        for name, (label, form) in SHOWN.items():
            if name in metrics:
                yield f"{label} {metrics[name]:{form}}"


def _clock(seconds: float) -> str:
    """``03:41``, or with hours ``1:02:03``."""
    return str(tqdm.format_interval(seconds))


def _on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _columns() -> int:
    return min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns) if _on_terminal() else COLUMNS
