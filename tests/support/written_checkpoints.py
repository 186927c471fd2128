"""Training checkpoints that no runtime has written: any tensors, in any pieces."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from rl_backend.checkpoint.manifest import MANIFEST_NAME, FileFacts, TrainingManifest
from rl_backend.checkpoint.training_state import WEIGHTS, DigestingWriter, PiecesSavePlanner, TensorPieces


def write_tensors(path: Path, tensors: Mapping[str, Tensor | TensorPieces]) -> dict[str, FileFacts]:
    """The files of ``torch.distributed.checkpoint`` and their facts."""
    writer = DigestingWriter(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save in a single process")
        save(dict(tensors), storage_writer=writer, planner=PiecesSavePlanner(), no_dist=True)
    return writer.written


def manifest_of(**fields: Any) -> TrainingManifest:
    """Of a Qwen3 that was saved by the native runtime, but for ``fields``."""
    given: dict[str, Any] = {
        "model_type": "qwen3",
        "parameters": {},
        "weight_version": 3,
        "schedule_steps": 4,
        "optimizer_steps": 5,
        "world_size": 2,
        "runtime_config": {"backend": "native", "hf_path": "/nowhere/model"},
    }
    return TrainingManifest(**{**given, **fields})


def write_checkpoint(path: Path, weights: Mapping[str, Tensor], **fields: Any) -> Path:
    """A checkpoint of ``weights``, Hugging Face name -> tensor.

    Args:
        fields: of its manifest.
    """
    files = write_tensors(path, {WEIGHTS + name: tensor for name, tensor in weights.items()})
    parameters = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    manifest = manifest_of(**{"parameters": parameters, "files": files, **fields})
    (path / MANIFEST_NAME).write_text(manifest.sealed_text())
    return path
