"""The weights of a training checkpoint on disk, under Hugging Face names, without a runtime and without ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from rl_backend.checkpoint.digesting_writer import file_facts
from rl_backend.checkpoint.manifest import read_manifest
from rl_backend.checkpoint.stored_metadata import METADATA_FILE
from rl_backend.checkpoint.tensors_reader import TensorsReader
from rl_backend.contracts import CheckpointError

PREFIX = "model."
"""Names of weights in a checkpoint begin with it."""


class TrainingWeights:
    """The weights of a training checkpoint, whichever runtime wrote it and in whichever layout.

    Opening checks that every file is there with its size and that all weights are stored. No file stays open between calls.

    Attributes:
        path: the checkpoint's directory.
        manifest: its manifest.
        shapes: Hugging Face name -> shape.

    Raises:
        CheckpointError: not a training checkpoint, an incomplete or damaged one, or one with weights that only the runtime
            which wrote it can name.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.manifest.require_files(self.path)
        if self.manifest.private:
            backend = self.manifest.runtime_config.get("backend")
            raise CheckpointError(
                f"{self.path} has {len(self.manifest.private)} weights in an order that only the {backend} runtime reads, "
                f"{self.manifest.private[0]} for one; load it there and use save_checkpoint(hf=True)",
                path=str(self.path),
            )
        self.shapes = dict(self.manifest.parameters)
        if not self.shapes:
            raise CheckpointError(f"{self.path} is damaged: its manifest lists no weights", path=str(self.path))
        self._verify(METADATA_FILE)
        self._reader = TensorsReader(self.path, self.manifest.files)
        for name, shape in self.shapes.items():
            self._reader.require_stored(PREFIX + name, shape, torch.float32)

    def verify(self, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Reads every file and compares it with its digest.

        Args:
            progress: told the size of each file that is verified.

        Raises:
            CheckpointError: a file has other bytes than were written.
        """
        for name, facts in self.manifest.files.items():
            self._verify(name)
            progress(facts.num_bytes)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in ``dtype`` on the CPU), in the order of ``shapes``.

        All are views of one buffer of the size of the largest, each valid until the next is taken. Beside it one piece of a
        tensor is in memory, in float32: what one rank has written of it.

        Raises:
            CheckpointError: a file cannot be read.
        """
        buffer = torch.empty(max(map(math.prod, self.shapes.values())), dtype=dtype)
        for name, shape in self.shapes.items():
            tensor = buffer[: math.prod(shape)].view(shape)
            self._fill(name, tensor)
            yield name, tensor

    def _fill(self, name: str, tensor: Tensor) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
                load({PREFIX + name: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            failures = [cause for cause, _ in error.failures.values()]
            for cause in failures:
                # An interrupt in the middle of a read is one of its failures.
                if not isinstance(cause, Exception):
                    raise cause from None
            causes = "; ".join(map(str, failures))
            raise CheckpointError(
                f"{name} cannot be read from {self.path}: {causes}", path=str(self.path), name=name
            ) from error

    def _verify(self, name: str) -> None:
        try:
            found = file_facts(self.path / name)
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}", path=str(self.path), name=name) from error
        if found != self.manifest.files.get(name):
            raise CheckpointError(
                f"{self.path} is damaged: {name} has other bytes than were written; take an earlier checkpoint",
                path=str(self.path),
                name=name,
            )
