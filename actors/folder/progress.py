"""Progress of a run: all that its checkpoint holds beside the models."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from actors.folder.checkpoints import RunCheckpoint
from actors.rollout.messages import Routes, Sample, VersionSpan
from rl_backend.checkpoint.manifest import FileFacts
from rl_backend.checkpoint.stored_metadata import load_problem
from rl_backend.contracts import CheckpointError, ConfigError

DRAWN_SAMPLES = "drawn_samples.pt"


@dataclass(frozen=True)
class StreamPosition:
    """A place between two batches of the data.

    Attributes:
        taken: batches that training has taken.
        drawn: samples of the following batches, where they are complete; their prompts are those of the data.
    """

    taken: int = 0
    drawn: Sequence[Sequence[Sample]] = ()


class Identity(NamedTuple):
    """What a resumed run must share with the one before.

    Attributes:
        example: name of the configuration's class.
        options: name -> value of those that decide, where they are not the default.
        contents: facts of files and functions that options name.
        dtype: of the trained parameters.
    """

    example: str
    options: Mapping[str, Any]
    contents: Mapping[str, Any]
    dtype: str | None = None


@dataclass(frozen=True)
class Progress:
    """How far a run has come after a step.

    A run that continues compares :attr:`identity`, cuts the logs of its folder back to :attr:`logs`, and restores the rest.
    What is drawn at random follows from seed, step and batch; the generators of training ranks are in the models.

    Attributes:
        step: training steps taken.
        state: of JSON; ``run``, ``logs``, ``batches``, and what each part of the loop wants back by its name.
        path: directory of the checkpoint; None where a run begins.
    """

    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def of(cls, checkpoint: RunCheckpoint | None) -> Self:
        """What a checkpoint says; None is where a run begins."""
        return cls() if checkpoint is None else cls(checkpoint.step, checkpoint.state, checkpoint.path)

    @classmethod
    def saved(
        cls,
        draft: Path,
        step: int,
        identity: Mapping[str, Any],
        logs: Mapping[str, Any],
        parts: Mapping[str, Any],
        position: StreamPosition | None,
    ) -> Self:
        """Progress to be committed with ``draft``, which gets the samples that were drawn ahead.

        Args:
            identity: as of :class:`Identity`.
            logs: name -> size and digest, as of :class:`~rl_backend.checkpoint.manifest.FileFacts`.
            parts: what parts of the loop want back.
            position: of the stream of samples; None for a loop without one.

        Raises:
            CheckpointError: the file system refuses.
        """
        state = {"run": identity, "logs": logs, **parts}
        if position is not None:
            state["batches"] = {"taken": position.taken}
            save_drawn(position.drawn, draft)
        return cls(step, state, draft)

    def part(self, name: str) -> Mapping[str, Any]:
        """What a part of the loop has saved; empty where a run begins.

        Raises:
            CheckpointError: the checkpoint has no such part.
        """
        if self.path is None:
            return {}
        saved = self.state.get(name)
        if not isinstance(saved, Mapping):
            problem = f"{self.path} has no usable {name!r} in its state; continue from another checkpoint"
            raise CheckpointError(problem, path=str(self.path))
        return saved

    @property
    def identity(self) -> Identity:
        """Of the run that saved the checkpoint.

        Raises:
            CheckpointError: another program saved it, or it is damaged.
        """
        try:
            saved: Mapping[str, Any] = self.state["run"]
            identity = Identity(saved["example"], saved["options"], saved["contents"], saved.get("dtype"))
            if not (isinstance(identity.options, dict) and isinstance(identity.contents, dict)):
                raise TypeError("its options and contents are not objects")
        except KeyError as error:
            problem = f"{self.path} is of another program: its state has no {error}; give it to that one"
            raise CheckpointError(problem) from None
        except (TypeError, AttributeError) as error:
            problem = f"{self.path} is damaged, its state does not say which run it belongs to ({error})"
            raise CheckpointError(f"{problem}; continue from another checkpoint", path=str(self.path)) from None
        return identity

    @property
    def logs(self) -> dict[str, FileFacts]:
        """What each log of the run's folder had.

        Raises:
            CheckpointError: it does not say.
        """
        try:
            return {name: FileFacts(**facts) for name, facts in self.state["logs"].items()}
        except (AttributeError, KeyError, TypeError, ConfigError) as error:
            problem = f"does not say what the logs of its run held ({type(error).__name__}: {error})"
            raise CheckpointError(f"{self.path} {problem}; continue from it in a new run_dir", path=str(self.path)) from None

    @property
    def position(self) -> StreamPosition:
        """Where a stream of samples continues.

        Raises:
            CheckpointError: it was saved by a loop without one, or samples that were drawn ahead cannot be read.
        """
        if self.path is None:
            return StreamPosition()
        return StreamPosition(self.part("batches")["taken"], load_drawn(self.path))


def save_drawn(batches: Sequence[Sequence[Sample]], directory: Path) -> None:
    """Writes samples to a file in ``directory``.

    Raises:
        CheckpointError: the file system refuses.
    """
    path, written = directory / DRAWN_SAMPLES, io.BytesIO()
    torch.save([[_to_dict(sample) for sample in batch] for batch in batches], written)
    try:
        path.write_bytes(written.getbuffer())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}", path=str(path)) from error


def load_drawn(directory: Path) -> list[list[Sample]]:
    """What :func:`save_drawn` wrote.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = directory / DRAWN_SAMPLES
    try:
        return [[_from_dict(sample) for sample in batch] for batch in torch.load(path, weights_only=True)]
    except Exception as error:  # pickle raises errors of any type for damaged data
        raise CheckpointError(f"{path} cannot be read: {load_problem(error)}", path=str(path)) from error


def _to_dict(sample: Sample) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    values["version_spans"] = [tuple(span) for span in sample.version_spans]
    if sample.routes is not None:
        # torch knows no read-only tensors.
        values["routes"] = {
            "experts": torch.from_numpy(sample.routes.experts.copy()),
            "weight_version": sample.routes.weight_version,
        }
    return values


def _from_dict(values: Mapping[str, Any]) -> Sample:
    routes = values["routes"]
    return Sample(
        **{
            **values,
            "version_spans": tuple(VersionSpan(*span) for span in values["version_spans"]),
            "routes": None if routes is None else Routes(routes["experts"].numpy(), routes["weight_version"]),
        }
    )
