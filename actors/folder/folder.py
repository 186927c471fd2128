"""The folder of a run, which a person and a program can both read."""

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from actors.cluster.prometheus import export_step
from actors.cluster.ray_watch import cluster_loss, exit_hooks
from actors.cluster.session import RunStopped, termination
from actors.folder.checkpoints import CHECKPOINTS, RunCheckpoints
from actors.folder.lock import RunLock, cannot_write, usable_run_dir, written_to
from actors.folder.resume import LOGS, LogFile, RunStart, read_file_of_run, require_new_run
from actors.folder.state import RunState, RunWatch
from actors.watch.metrics import Curves, WriterFacts
from actors.watch.trace import TraceCollector, TraceSource
from rl_backend.checkpoint.durable_commit import replace_text
from rl_backend.contracts import BaseConfig, ClusterLostError, ConfigError, RunFolderError
from rl_backend.lab.report.page import FILE_NAME, write_report
from rl_backend.lab.text import json_text


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def set_aside(path: Path) -> Path:
    """Renames whatever is at ``path`` to ``NAME.1.SUFFIX``, or the first free number; returns ``path``."""
    if path.exists():
        free = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
        path.rename(next(other for other in free if not other.exists()))
    return path


class RunFolder:
    """What a run leaves in one directory: a report for people, files for programs, and live metrics while it runs.

    ``report.html`` is written about every minute and when the run ends, however it ends, of ``config.json``,
    ``metrics.jsonl``, ``samples.jsonl``, ``held_out.jsonl``, ``summary.json`` and ``run.json`` (``state`` is running,
    finished, failed, interrupted or killed); ``rl-backend report DIR`` makes it again. Where Ray runs, each step's metrics
    are also exported to Prometheus. A run that continues in the folder cuts its logs back, so each step appears once.

    Args:
        path: holds no other run, and none that is still running.
        trace: the groups whose actors are traced in ``trace.json``, with this process; empty for no trace.
        report_seconds: shortest time between two reports during the run; 0 writes one at its end only.
        lock: of the folder, where it was taken before; released with the folder.
        metrics_to: writers beside ``metrics.jsonl``, see :class:`~actors.watch.metrics.Curves`.

    Raises:
        ConfigError: the folder holds another run, has changed since ``start`` was decided, or cannot be written to.

    Methods that write raise :class:`~rl_backend.contracts.RunFolderError` where the file system refuses.
    """

    def __init__(
        self,
        path: Path | str,
        config: BaseConfig,
        *,
        start: RunStart | None = None,
        trace: Sequence[TraceSource] = (),
        report_seconds: float = 60.0,
        lock: RunLock | None = None,
        metrics_to: str | None = "tensorboard",
    ) -> None:
        start = start or RunStart()
        if not start.same_folder and not start.replaces:
            require_new_run(path)
        self.path = Path(path).resolve()
        self._lock = lock or RunLock(self.path)
        self._state = RunState(self.path)
        self._watch = RunWatch(self.path)
        try:
            with usable_run_dir(self.path):
                self._open(config, start, metrics_to)
                self._trace: TraceCollector | None = None
                if trace:
                    self.record(trace)
        except BaseException as error:
            if self._state.running:
                with suppress(OSError):
                    self._write_end(error)
            self._watch.close()
            self._lock.release()
            raise
        self._report_seconds = report_seconds
        # A run that hangs when Ray is lost is ended by os._exit, past every context.
        exit_hooks.append(self._write_end)
        self._last_log = time.monotonic_ns()
        self._next_report = time.monotonic() + report_seconds if report_seconds else math.inf

    def _open(self, config: BaseConfig, start: RunStart, metrics_to: str | None) -> None:
        newest = max(RunCheckpoints(self.path / CHECKPOINTS).steps(), default=None)
        if newest != start.newest:
            raise ConfigError.of(
                "run_dir",
                str(self.path),
                f"another run saved step {newest} here in the meantime; restart to continue from it",
            )
        self._metrics, self._samples, self._held_out = (LogFile(self.path / name, start.kept.get(name)) for name in LOGS)
        self._facts: dict[str, Any] = {"started": _now(), "resumed": []}
        if start.same_folder:
            earlier = read_file_of_run(self.path, "run.json")
            damaged = {"damaged": [path.name for path in start.damaged]} if start.damaged else {}
            resumed = [*earlier.get("resumed", []), {"after_step": start.step, "at": _now(), **damaged}]
            self._facts = {"started": earlier.get("started"), "resumed": resumed}
        options = config.model_dump_json(indent=2) + "\n"
        if not (self.path / "run.json").exists():
            # What a run writes is there after its run.json: these are a user's, such as the file of --config.
            for name in ("config.json", FILE_NAME):
                set_aside(self.path / name)
        if not start.same_folder:
            # First: it says where the run began.
            replace_text(self.path / "config.json", options)
        self._write_state("running")
        self._watch.start()
        if start.same_folder:
            # After the state: they would be the options of a run that has finished.
            replace_text(self.path / "config.json", options)
        set_aside(self.path / "summary.json")
        first = 0 if start.checkpoint is None else start.step + 1
        drop_from = first if start.same_folder or start.replaces else None
        identity = xxhash.xxh3_64(f"{self.path} {self._facts['started']}".encode()).hexdigest()
        self._curves = Curves(metrics_to, WriterFacts(self.path, config.model_dump(mode="json"), identity, drop_from))

    def record(self, trace: Sequence[TraceSource]) -> None:
        self._trace = TraceCollector(set_aside(self.path / "trace.json"), trace)

    def log(self, step: int, metrics: Mapping[str, float | int], warnings: Sequence[str] = ()) -> None:
        """One line of ``metrics.jsonl``, one point of every curve and Prometheus gauge, and a step of the trace."""
        with written_to(self.path):
            self._metrics.write({"step": step, **metrics, **({"warnings": list(warnings)} if warnings else {})})
            self._curves.write(step, metrics)
        export_step(str(self.path), step, {name: float(value) for name, value in metrics.items()})
        now = time.monotonic_ns()
        if self._trace is not None:
            self._keep_or_drop(self._trace, lambda trace: trace.step(step, self._last_log, now))
        self._last_log = now
        if time.monotonic() >= self._next_report:
            self._report()

    def log_start(self, metrics: Mapping[str, float | int]) -> None:
        """What was measured before training, as step 0."""
        with written_to(self.path):
            self._metrics.write({"step": 0, **metrics})
            self._curves.write(0, metrics)
        export_step(str(self.path), 0, {name: float(value) for name, value in metrics.items()})

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """One line of ``samples.jsonl`` per sample; the report shows ``prompt``, ``response`` and ``reward`` of each."""
        with written_to(self.path):
            self._samples.write(*({"step": step, **sample} for sample in samples))

    def log_held_out(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """One line of ``held_out.jsonl`` per answer to a held-out prompt; step 0 is before training."""
        with written_to(self.path):
            self._held_out.write(*({"step": step, **sample} for sample in samples))

    def sync_logs(self) -> dict[str, dict[str, Any]]:
        """Flushes the logs to the disk; name -> size and digest, which :class:`RunStart` keeps of them."""
        logs = zip(LOGS, (self._metrics, self._samples, self._held_out), strict=True)
        with written_to(self.path):
            self._curves.flush()
            return {name: log.sync().model_dump(mode="json") for name, log in logs}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        with written_to(self.path):
            replace_text(self.path / "summary.json", json_text(summary, indent=2) + "\n")

    def place(self, name: str) -> Path:
        with written_to(self.path):
            return set_aside(self.path / name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # From here on this method says how the run ended.
        exit_hooks.remove(self._write_end)
        refused: dict[str, OSError] = {}
        logs = (self._metrics, self._samples, self._held_out, self._curves)
        # TensorBoard's writer says what its thread has lost when it is flushed, not when it is closed.
        for end in (self._curves.flush, *(log.close for log in logs)):
            try:
                end()
            except OSError as problem:
                refused[str(problem)] = problem
        lost = RunFolderError(cannot_write(self.path, "; ".join(refused)), path=str(self.path)) if refused else None
        # A call into Ray that a signal or the loss of Ray has ended raises whatever comes of that.
        cause = None if isinstance(error, RunStopped) else error and (termination() or cluster_loss())
        ended_by = cause or error or lost
        try:
            self._write_end(ended_by)
        except OSError as problem:
            lost = lost or RunFolderError(cannot_write(self.path, problem), path=str(self.path))
        try:
            if self._trace is not None:
                self._keep_or_drop(self._trace, TraceCollector.close)
        finally:
            try:
                self._report()
            finally:
                self._watch.close()
                self._lock.release()
        if lost is not None and error is None:
            raise lost
        if lost is not None and error is not None and not isinstance(error, RunFolderError):
            error.add_note(str(lost))

    def _keep_or_drop(self, trace: TraceCollector, use: Callable[[TraceCollector], None]) -> None:
        try:
            use(trace)
        except ClusterLostError:
            raise
        except Exception as error:  # noqa: BLE001, a run of days must not end for its trace
            self._trace = None
            with suppress(Exception):  # what broke it may break its end; the first error is the one to tell
                trace.close()
            message = f"{self.path}/trace.json ends here, {type(error).__name__}: {error}"
            warnings.warn(f"{message}; the run continues without a trace", stacklevel=3)

    def _report(self) -> None:
        started = time.monotonic()
        try:
            write_report(self.path)
        except ClusterLostError:
            raise
        except Exception as error:  # noqa: BLE001, a run of days must not end for a picture of it
            message = f"{self.path}/report.html was not written, {type(error).__name__}: {error}"
            warnings.warn(f"{message}; `rl-backend report {self.path} --debug` shows where", stacklevel=2)
        ended = time.monotonic()
        # Spend at most 2% of the run on reports.
        self._next_report = ended + max(self._report_seconds, 50 * (ended - started))

    def _write_end(self, error: BaseException | None) -> None:
        if error is None:
            self._write_state("finished")
            return
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        text = str(error) if isinstance(error, RunStopped) else f"{type(error).__name__}: {error}".rstrip(": ")
        self._write_state(state, text)

    def _write_state(self, state: str, error: str | None = None) -> None:
        facts = {
            "state": state,
            "error": error,
            **self._facts,
            "process": self._watch.process,
            "ended": None if state == "running" else _now(),
            "command": [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
        }
        self._state.write(facts, last=state != "running")
