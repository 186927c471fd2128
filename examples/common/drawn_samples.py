"""Where a stream of samples is: what has been trained on, and what has been drawn and not yet been trained on."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors import Sample
from actors.rollout.sample import Routes, VersionSpan
from rl_backend.checkpoint.stored_metadata import load_problem
from rl_backend.contracts import CheckpointError

FILE_NAME = "drawn_samples.pt"


@dataclass(frozen=True)
class StreamPosition:
    """A place between two batches.

    Attributes:
        taken: batches that training has taken.
        drawn: samples of the batches that follow, as far as they are sampled; their prompts are those of the data.
    """

    taken: int = 0
    drawn: Sequence[Sequence[Sample]] = ()


def save_drawn(batches: Sequence[Sequence[Sample]], directory: Path) -> None:
    """Writes samples to a file in ``directory``.

    Raises:
        CheckpointError: the file system refuses.
    """
    path, written = directory / FILE_NAME, io.BytesIO()
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
    path = directory / FILE_NAME
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
