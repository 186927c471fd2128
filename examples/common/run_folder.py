"""A folder per run that a person and a program can both read."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from torch.utils.tensorboard import SummaryWriter

from actors.prometheus import export_step
from actors.trace import TraceCollector, TraceSource
from rl_backend.contracts import BaseConfig, ConfigError
from rl_backend.report import write_report


def require_new_run(path: Path | str) -> None:
    """Raises :class:`ConfigError` when ``path`` holds a run that has taken a step."""
    metrics = Path(path) / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise ConfigError.of("run_dir", str(path), "holds another run; choose a new directory or remove it")


def _write_lines(file: TextIO, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
    for sample in samples:
        file.write(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n")


class RunFolder:
    """What a run leaves in one directory: a report for people, files for programs, and live metrics while it runs.

    ``report.html`` is written when the run ends, however it ends, and now and then before. It is made of ``config.json``,
    ``metrics.jsonl``, ``samples.jsonl``, ``held_out.jsonl``, ``summary.json`` and ``run.json`` (``state`` is running,
    finished, failed or interrupted); ``rl-backend report DIR`` makes it again. Beside them are TensorBoard events and, with
    ``trace``, ``trace.json`` for Perfetto. Where Ray runs, each step's metrics are also exported to Prometheus.

    Args:
        path: see :func:`require_new_run`.
        config: written first.
        trace: the groups whose actors are traced, with this process; empty for no trace.
        report_seconds: shortest time between two reports of a run that goes on; 0 writes one at its end alone.
    """

    def __init__(
        self,
        path: Path | str,
        config: BaseConfig,
        *,
        trace: Sequence[TraceSource] = (),
        report_seconds: float = 60.0,
    ) -> None:
        require_new_run(path)
        self.path = Path(path).resolve()
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
        self._started = datetime.now(UTC)
        self._write_state("running")
        self._metrics = (self.path / "metrics.jsonl").open("w", buffering=1)
        self._samples = (self.path / "samples.jsonl").open("w", buffering=1)
        self._held_out = (self.path / "held_out.jsonl").open("w", buffering=1)
        self._board = SummaryWriter(str(self.path / "tensorboard"))
        self._report_seconds = report_seconds
        self._trace = TraceCollector(self.path / "trace.json", trace) if trace else None
        self._last_log = time.monotonic_ns()
        self._next_report = time.monotonic() + report_seconds if report_seconds else math.inf

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """One line of ``metrics.jsonl``, one point per TensorBoard curve and Prometheus gauge, and a step of the trace."""
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        export_step(str(self.path), step, {name: float(value) for name, value in metrics.items()})
        now = time.monotonic_ns()
        if self._trace is not None:
            self._keep_or_drop(self._trace, lambda trace: trace.step(step, self._last_log, now))
        self._last_log = now
        if time.monotonic() >= self._next_report:
            self._report()

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """One line of ``samples.jsonl`` per sample; the report shows ``prompt``, ``response`` and ``reward`` of each."""
        _write_lines(self._samples, step, samples)

    def log_held_out(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """One line of ``held_out.jsonl`` per answer to a held-out prompt; step 0 is before training."""
        _write_lines(self._held_out, step, samples)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """``summary.json``; a later call replaces an earlier one."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._metrics.close()
        self._samples.close()
        self._held_out.close()
        self._board.close()
        if error is None:
            self._write_state("finished")
        else:
            interrupted = isinstance(error, KeyboardInterrupt)
            self._write_state("interrupted" if interrupted else "failed", f"{type(error).__name__}: {error}".rstrip(": "))
        try:
            if self._trace is not None:
                self._keep_or_drop(self._trace, TraceCollector.close)
        finally:
            self._report()

    def _keep_or_drop(self, trace: TraceCollector, use: Callable[[TraceCollector], None]) -> None:
        try:
            use(trace)
        except Exception as error:  # noqa: BLE001, a run of days must not end for its trace
            self._trace = None
            with suppress(Exception):  # what broke it may break its end; the first error is the one to tell
                trace.close()
            message = f"{self.path}/trace.json ends here, {type(error).__name__}: {error}"
            warnings.warn(f"{message}; the run goes on without a trace", stacklevel=3)

    def _report(self) -> None:
        started = time.monotonic()
        try:
            write_report(self.path)
        except Exception as error:  # noqa: BLE001, a run of days must not end for a picture of it
            message = f"{self.path}/report.html was not written, {type(error).__name__}: {error}"
            warnings.warn(f"{message}; `rl-backend report {self.path} --debug` shows where", stacklevel=2)
        ended = time.monotonic()
        # Reports take at most two hundredths of the time of a run.
        self._next_report = ended + max(self._report_seconds, 50 * (ended - started))

    def _write_state(self, state: str, error: str | None = None) -> None:
        facts = {
            "state": state,
            "error": error,
            "started": self._started.isoformat(timespec="seconds"),
            "ended": None if state == "running" else datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
        }
        (self.path / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
