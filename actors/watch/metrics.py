"""Metrics of each step: seconds of its phases, and the writers of them all, such as TensorBoard's."""

import importlib
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from actors.options.config import import_writer, instead_of, writer_names
from rl_backend.contracts import ConfigError
from rl_backend.trace.recorder import recorder


class Clock:
    """Seconds of each phase of a step, as metrics ``seconds/<phase>`` and as events of the trace."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._last = time.monotonic_ns()

    def lap(self, phase: str, tokens: int = 0) -> None:
        """Ends ``phase``, which worked on ``tokens`` and began with the lap before or with the clock. Repeated phases add
        up.
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


class WriterFacts(NamedTuple):
    """What a writer is made with; ``options`` as JSON.

    Attributes:
        identity: the same for a run that was resumed in its folder, and for no other run.
        drop_from: step from which on an earlier writer's points are replaced; None where there is none.
    """

    folder: Path
    options: Mapping[str, Any]
    identity: str
    drop_from: int | None


class MetricsWriter(Protocol):
    """A receiver of each step's metrics. Your own is named by ``package.module:Class``, and made with a WriterFacts."""

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
    """A run at a service that stores each step as soon as it is told."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # The run is asked, not its package, whose current run may be that of another user's thread.
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class WandbWriter(_TrackingWriter):
    """Weights & Biases, in project ``WANDB_PROJECT`` or rl-backend."""

    def __init__(self, facts: WriterFacts) -> None:
        import wandb

        super().__init__(
            wandb.init(
                project=os.environ.get("WANDB_PROJECT", "rl-backend"),
                name=facts.folder.name,
                # With the same id a resumed run continues its curves.
                id=facts.identity,
                resume="allow",
                dir=str(facts.folder),
                config=dict(facts.options),
                reinit="create_new",  # beside the runs of other users in this process
            )
        )


class TrackioWriter(_TrackingWriter):
    """trackio, in project ``TRACKIO_PROJECT`` or rl-backend."""

    def __init__(self, facts: WriterFacts) -> None:
        trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", "rl-backend")
        name = f"{facts.folder.name}-{facts.identity[:6]}"
        super().__init__(trackio.init(project=project, name=name, config=dict(facts.options), resume="allow"))


class MlflowWriter:
    """MLflow, in the experiment that ``MLFLOW_EXPERIMENT_NAME`` names."""

    def __init__(self, facts: WriterFacts) -> None:
        self._mlflow = mlflow = importlib.import_module("mlflow")
        file = facts.folder / "mlflow_run_id"
        known = file.read_text().strip() if facts.drop_from is not None and file.exists() else None
        # MLflow's active run is one of each thread: a writer is made and closed in the thread of its run.
        run = mlflow.start_run(run_id=known, run_name=None if known else facts.folder.name)
        self._run_id = run.info.run_id
        if known is None:
            file.write_text(f"{self._run_id}\n")
            mlflow.log_params({name: str(value) for name, value in facts.options.items()})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # MLflow refuses names with an @, such as pass@8.
        named = {name.replace("@", "_at_"): float(value) for name, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step, run_id=self._run_id)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._mlflow.end_run()


WRITERS: Mapping[str, Any] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "mlflow": MlflowWriter,
    "trackio": TrackioWriter,
}
"""Those of :data:`~actors.options.config.BUILT_IN`."""


class Curves:
    """Every writer of a run; raises :class:`ConfigError` for one that cannot be opened."""

    def __init__(self, names: str | None, facts: WriterFacts) -> None:
        self._writers: dict[str, MetricsWriter] = {}
        wanted = writer_names(names)
        for name in wanted:
            try:
                self._writers[name] = (WRITERS.get(name) or import_writer(name))(facts)
            except Exception as error:
                self.close()
                if isinstance(error, OSError) and name == "tensorboard":
                    raise
                problem = f"cannot be opened, {type(error).__name__}: {error}; see to it, or {instead_of(wanted)}"
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
                # TensorBoard writes to the run's folder. A run of days must not end for a service elsewhere.
                if name == "tensorboard":
                    raise
                del self._writers[name]
                message = f"metrics no longer go to {name}, {type(error).__name__}: {error}; the run continues without it"
                warnings.warn(message, stacklevel=4)
