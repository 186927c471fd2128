"""A Hugging Face directory out of a training checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backend.checkpoint.hf_critic import critic_config
from rl_backend.checkpoint.hf_other_files import other_files
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.checkpoint.hf_writer import DEFAULT_SHARD_BYTES, write_hf_directory
from rl_backend.checkpoint.training_weights import TrainingWeights
from rl_backend.contracts import CheckpointError, TensorInfo

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_FIELDS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


def source_of(weights: TrainingWeights, given: Path | str | None = None) -> Path:
    """The Hugging Face directory with the configuration and the tokenizer of a checkpoint's model.

    Args:
        given: None takes the directory that the run began from.

    Raises:
        CheckpointError: it is not there, has a link that leads out of it, or its ``config.json`` does not say that it is of
            this model. A manifest may name any folder of this machine, so one that leaves the question open is refused.
    """
    began_from = weights.manifest.runtime_config.get("hf_path")
    source = Path(given if given is not None else str(began_from))
    if not source.is_dir():
        whose = "given as source" if given is not None else f"which the run of {weights.path} began from"
        raise CheckpointError(
            f"{source}, {whose}, is not a directory; give one with the model's config.json and tokenizer as source (weights "
            "are not needed)",
            path=str(source),
        )
    _require_same_model(weights, read_hf_config(source), source)
    other_files(source)
    return source


def export_checkpoint(
    weights: TrainingWeights,
    out: Path | str,
    source: Path | str,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes what transformers and vLLM load to ``out``, complete or not at all.

    In memory are the largest tensor and a stored piece of it. Files are not verified: see
    :meth:`~rl_backend.checkpoint.training_weights.TrainingWeights.verify`.

    Args:
        out: must not exist; its parent must.
        source: from :func:`source_of`.
        dtype: of every weight. Checkpoints have float32 masters.
        max_shard_bytes: largest size of one file; a larger tensor gets a file of its own.
        progress: told the bytes of each tensor that is read.

    Raises:
        CheckpointError: see :func:`~rl_backend.checkpoint.hf_writer.write_hf_directory`, or a file cannot be read.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.tensors(dtype):
            yield name, tensor
            progress(tensor.nbytes)

    config = critic_config(read_hf_config(source)) if weights.manifest.head == "values" else None
    infos = [
        TensorInfo(name=name, shape=shape, dtype=str(dtype).removeprefix("torch."), nbytes=math.prod(shape) * dtype.itemsize)
        for name, shape in weights.shapes.items()
    ]
    write_hf_directory(out, infos, tensors(), source, config=config, max_shard_bytes=max_shard_bytes)


def _require_same_model(weights: TrainingWeights, config: Mapping[str, Any], source: Path) -> None:
    saved: dict[str, object] = {"model_type": weights.manifest.model_type}
    layers = [int(found[1]) for name in weights.shapes if (found := _LAYER.search(name))]
    if layers:
        saved["num_hidden_layers"] = max(layers) + 1
    for name, shape in weights.shapes.items():
        if name.endswith("embed_tokens.weight") and len(shape) == 2:
            saved["vocab_size"], saved["hidden_size"] = shape
    for field in _FIELDS:
        found = config.get(field)
        if found is None:
            raise CheckpointError(
                f"{source} is refused: its config.json has no {field}, so it is not known to be of the model in "
                f"{weights.path}; give the directory that the run began from, or a copy, as source",
                path=str(source),
                field=field,
            )
        if found != saved.get(field, found):
            raise CheckpointError(
                f"{source} is of another model: its config.json has {field}={found!r}, the model in {weights.path} "
                f"has {saved[field]!r}; give the directory that the run began from, or a copy",
                path=str(source),
                field=field,
            )
    vocab_size, hidden_size = config["vocab_size"], config["hidden_size"]
    if (vocab_size, hidden_size) not in weights.shapes.values():
        raise CheckpointError(
            f"{source} is of another model: its config.json has vocab_size={vocab_size!r} and hidden_size={hidden_size!r}, "
            f"the model in {weights.path} has no such weight; give the directory that the run began from, or a copy",
            path=str(source),
            field="vocab_size",
        )
