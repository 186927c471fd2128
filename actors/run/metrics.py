"""The numbers of a run: phases of a step, log files, and writers such as TensorBoard's for the metrics of each step.

A writer is named by :data:`WRITERS`, or by ``package.module:Class`` for one of your own: a :class:`MetricsWriter` that is
made with a :class:`WriterFacts`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash

from rl_backend.checkpoint.manifest import FileFacts
from rl_backend.checkpoint.state_files import file_facts
from rl_backend.contracts import ConfigError
from rl_backend.lab.text import json_text
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


class LogFile:
    """Lines that are appended to a file, each whole when it is written.

    Args:
        kept: of its bytes; later ones are cut off. None keeps nothing.

    Raises:
        ConfigError: it does not begin with what is kept.
    """

    def __init__(self, path: Path, kept: FileFacts | None = None) -> None:
        self._digest, self._size = xxhash.xxh3_64(), 0
        if kept is not None:
            require_unchanged(path, kept)
            with path.open("rb") as stream:
                while self._size < kept.num_bytes:
                    self._count(stream.read(min(kept.num_bytes - self._size, 1 << 22)))
        self._file = path.open("ab", buffering=0)
        self._file.truncate(self._size)

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Appends one line for each."""
        text = "".join(json_text(line, ensure_ascii=False) + "\n" for line in lines).encode()
        self._count(text)
        while text:
            text = text[self._file.write(text) :]

    def sync(self) -> FileFacts:
        """Flushes the lines to the disk; what the file then holds."""
        os.fsync(self._file.fileno())
        return FileFacts(num_bytes=self._size, xxh3=self._digest.hexdigest())

    def close(self) -> None:
        """Ends it."""
        self._file.close()

    def _count(self, data: bytes) -> None:
        self._digest.update(data)
        self._size += len(data)


def require_unchanged(log: Path, facts: FileFacts) -> None:
    """Checks that a log begins with the lines that it had when a checkpoint was saved.

    Raises:
        ConfigError: lines are lost or changed, or it cannot be read.
    """
    try:
        found = file_facts(log, facts.num_bytes)
    except OSError as error:
        raise ConfigError.of("resume", str(log), f"cannot be read: {error}") from None
    if found.num_bytes < facts.num_bytes:
        problem = f"has lost lines: it had {facts.num_bytes} bytes at the checkpoint and has {found.num_bytes}"
    elif found != facts:
        problem = f"is damaged: its first {facts.num_bytes} bytes are not those that it had at the checkpoint"
    else:
        return
    raise ConfigError.of("resume", str(log), f"{problem}; repair it, or continue from the checkpoint in a new run_dir")


class WriterFacts(NamedTuple):
    """What a writer is made with.

    Attributes:
        folder: the run's.
        options: the run's configuration, as JSON.
        identity: the same for a run that was resumed in its folder, and for no other run.
        drop_from: step from which on an earlier writer's points are replaced; None where there is none.
    """

    folder: Path
    options: Mapping[str, Any]
    identity: str
    drop_from: int | None


class MetricsWriter(Protocol):
    """A receiver of each step's metrics, besides ``metrics.jsonl`` and Prometheus."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def flush(self) -> None:
        """Hands over what was written; raises if something was lost."""

    def close(self) -> None: ...


class TensorBoardWriter:
    """Curves in ``tensorboard/`` of the run's folder."""

    def __init__(self, facts: WriterFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(facts.folder / "tensorboard"), purge_step=facts.drop_from)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        self._board.flush()

    def close(self) -> None:
        self._board.close()


class _TrackingWriter:
    """A service that stores each step as soon as it is told."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log({name: float(value) for name, value in metrics.items()}, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._module.finish()


class WandbWriter(_TrackingWriter):
    """Weights & Biases, in project ``WANDB_PROJECT`` or rl-backend. A resumed run continues its curves."""

    def __init__(self, facts: WriterFacts) -> None:
        import wandb

        super().__init__(wandb)
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rl-backend"),
            name=facts.folder.name,
            id=facts.identity,
            resume="allow",
            dir=str(facts.folder),
            config=dict(facts.options),
        )


class TrackioWriter(_TrackingWriter):
    """trackio, in project ``TRACKIO_PROJECT`` or rl-backend. A resumed run continues its curves."""

    def __init__(self, facts: WriterFacts) -> None:
        trackio = importlib.import_module("trackio")
        super().__init__(trackio)
        project = os.environ.get("TRACKIO_PROJECT", "rl-backend")
        name = f"{facts.folder.name}-{facts.identity[:6]}"
        trackio.init(project=project, name=name, config=dict(facts.options), resume="allow")


class MlflowWriter(_TrackingWriter):
    """MLflow, in the experiment that ``MLFLOW_EXPERIMENT_NAME`` names. A resumed run continues its curves."""

    def __init__(self, facts: WriterFacts) -> None:
        mlflow = importlib.import_module("mlflow")
        super().__init__(mlflow)
        file = facts.folder / "mlflow_run_id"
        known = file.read_text().strip() if facts.drop_from is not None and file.exists() else None
        run = mlflow.start_run(run_id=known, run_name=None if known else facts.folder.name)
        if known is None:
            file.write_text(f"{run.info.run_id}\n")
            mlflow.log_params({name: str(value) for name, value in facts.options.items()})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow refuses names with an @, such as pass@8.
        self._module.log_metrics({name.replace("@", "_at_"): float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._module.end_run()


WRITERS = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter, "mlflow": MlflowWriter, "trackio": TrackioWriter}
"""By name, which is also that of the package that a writer needs."""


def writer_classes(names: str | None) -> dict[str, Any]:
    """The writers that ``names``, with commas between them, asks for.

    Raises:
        ConfigError: an unknown name, a package that is not installed, or a class that cannot be imported.
    """
    return {name: _writer_class(name) for part in (names or "").split(",") if (name := part.strip())}


def _writer_class(name: str) -> Any:
    if name in WRITERS:
        if importlib.util.find_spec(name) is None:
            raise ConfigError.of("metrics_to", name, f"{name} is not installed: pip install {name}, or leave it out")
        return WRITERS[name]
    module, separator, attribute = name.partition(":")
    if not separator:
        known = ", ".join(WRITERS)
        raise ConfigError.of("metrics_to", name, f"is none of {known}; a writer of your own is package.module:Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.of("metrics_to", name, f"cannot be imported: {error}") from None


class Curves:
    """Every writer of a run.

    An error of TensorBoard's, which writes to the run's folder, is raised. Another writer that fails is dropped with a
    warning: a run of days must not end because of a service elsewhere.

    Args:
        names: as :func:`writer_classes` reads them.

    Raises:
        ConfigError: one that cannot be opened.
    """

    def __init__(self, names: str | None, facts: WriterFacts) -> None:
        self._writers: dict[str, MetricsWriter] = {}
        for name, kind in writer_classes(names).items():
            try:
                self._writers[name] = kind(facts)
            except Exception as error:
                self.close()
                if isinstance(error, OSError) and name == "tensorboard":
                    raise
                problem = f"cannot be opened, {type(error).__name__}: {error}; see to it, or leave it out"
                raise ConfigError.of("metrics_to", name, problem) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each("write", step, metrics)

    def flush(self) -> None:
        self._each("flush")

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *arguments: Any) -> None:
        for name, writer in list(self._writers.items()):
            try:
                getattr(writer, method)(*arguments)
            except Exception as error:
                if name == "tensorboard":
                    raise
                del self._writers[name]
                message = f"metrics no longer go to {name}, {type(error).__name__}: {error}; the run continues without it"
                warnings.warn(message, stacklevel=4)
