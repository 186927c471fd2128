"""Export of a training checkpoint to a Hugging Face directory, without a runtime or ranks."""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from rl_backend.checkpoint.hf_reader import other_files, read_hf_config
from rl_backend.checkpoint.hf_writer import DEFAULT_SHARD_BYTES, critic_config, write_hf_directory
from rl_backend.checkpoint.kept_weights import describe_kept, open_kept
from rl_backend.checkpoint.manifest import read_manifest
from rl_backend.checkpoint.metadata_unpickler import METADATA_FILE
from rl_backend.checkpoint.quantisation import in_mxfp4, mxfp4_infos
from rl_backend.checkpoint.training_state import WEIGHTS, TensorsReader, require_written, told_as_checkpoint_error
from rl_backend.contracts import CheckpointError, TensorInfo, dtype_from_name, export_dtype, text_config

_LAYER = re.compile(r"\blayers\.(\d+)\.")
# DeepSeek and GLM number layers for multi-token prediction behind the others and do not count them among them.
_DRAFTING_LAYER = re.compile(r"\blayers\.(\d+)\.eh_proj\.")
_FIELDS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


class TrainingWeights:
    """The weights of a training checkpoint, whichever runtime wrote it and in whichever layout.

    Opening checks that every file is there with its size and that all weights are stored. No file stays open between calls.

    Raises:
        CheckpointError: not a training checkpoint of a whole model, an incomplete or damaged one, or one with weights that
            only the runtime which wrote it can name.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.manifest.require_files(self.path)
        private, problem = self.manifest.private, None
        if self.manifest.lora is not None:
            problem = (
                "holds a LoRA tenant, not a model; load it into a tenant of its base, and use export_lora_adapter, or "
                "save_checkpoint(hf=True) for the model with the adapter added"
            )
        elif private:
            problem = (
                f"has {len(private)} weights in an order that only the {self.manifest.runtime_config.get('backend')} "
                f"runtime reads, {private[0]} for one; load it there and use save_checkpoint(hf=True)"
            )
        if problem:
            raise CheckpointError.at(self.path, problem)
        self.shapes = dict(self.manifest.parameters)
        require_written(self.path, METADATA_FILE, self.manifest.files.get(METADATA_FILE))
        self._reader = TensorsReader(self.path, self.manifest.files)
        for name, shape in self.shapes.items():
            self._reader.require_stored(WEIGHTS + name, shape, torch.float32)

    def verify(self, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Compares every file with its digest (:class:`CheckpointError`), and tells ``progress`` the size of each."""
        for name, facts in self.manifest.files.items():
            require_written(self.path, name, facts)
            progress(facts.num_bytes)

    def infos(self, dtype: torch.dtype) -> list[TensorInfo]:
        """Of all weights in ``dtype``, but for those that are computed with in float32, whatever the dtype of the rest."""
        in_float32 = set(self.manifest.in_float32)
        return [
            TensorInfo.of(name, shape, export_dtype(dtype, in_float32=name in in_float32))
            for name, shape in self.shapes.items()
        ]

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor on the CPU as :meth:`infos` says), each valid until the next is taken.

        In memory are one buffer of the size of the largest, and one stored piece, as one rank wrote it in float32.
        """
        infos = self.infos(dtype)
        buffer = torch.empty(max(info.nbytes for info in infos), dtype=torch.uint8)
        for name, shape, tensor_dtype in ((info.name, info.shape, dtype_from_name(info.dtype)) for info in infos):
            tensor = buffer[: math.prod(shape) * tensor_dtype.itemsize].view(tensor_dtype).view(shape)
            with told_as_checkpoint_error(f"{name} cannot be read from {self.path}"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
                load({WEIGHTS + name: tensor}, storage_reader=self._reader, no_dist=True)
            yield name, tensor


def source_of(weights: TrainingWeights, given: Path | str | None = None) -> Path:
    """The Hugging Face directory of a checkpoint's model, with config and tokenizer: ``given``, or that of its run."""
    began_from = weights.manifest.runtime_config.get("hf_path")
    source = Path(given if given is not None else str(began_from))
    if not source.is_dir():
        whose = "given as source" if given is not None else f"which the run of {weights.path} began from"
        raise CheckpointError(
            f"{source}, {whose}, is not a directory; give one with the model's config.json and tokenizer as source "
            f"({_needed(weights.manifest.kept)})",
            path=str(source),
        )
    # A manifest may name any folder of this machine: one that does not prove the match would have its files copied.
    _require_same_model(weights, read_hf_config(source), source)
    other_files(source)
    open_kept(source, weights.manifest.kept)
    return source


def _needed(kept: Mapping[str, tuple[int, ...]]) -> str:
    return f"of its weights {describe_kept(kept)} are needed, which were not trained" if kept else "weights are not needed"


def export_checkpoint(
    weights: TrainingWeights,
    out: Path | str,
    source: Path | str,
    *,
    dtype: torch.dtype,
    mxfp4: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes what transformers and vLLM load to ``out``, complete or not at all, with the weights that ``source`` keeps.

    In memory are the largest tensor and a stored piece of it. Files are not verified: see :meth:`TrainingWeights.verify`.

    Args:
        source: from :func:`source_of`.
        dtype: of trained weights, as in :meth:`TrainingWeights.infos`.
        mxfp4: write experts in MXFP4, as gpt-oss is published.
        max_shard_bytes: see :func:`~rl_backend.checkpoint.hf_writer.write_hf_directory`.
        progress: told the bytes of each tensor that is read.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.tensors(dtype):
            yield name, tensor
            progress(tensor.nbytes)

    config = critic_config(read_hf_config(source)) if weights.manifest.head == "values" else None
    infos, found = weights.infos(dtype), tensors()
    if mxfp4:
        infos, found = mxfp4_infos(infos), in_mxfp4(found)
    write_hf_directory(
        out,
        infos,
        found,
        source,
        config=config,
        mxfp4=mxfp4,
        kept=weights.manifest.kept,
        max_shard_bytes=max_shard_bytes,
    )


def _require_same_model(weights: TrainingWeights, config: Mapping[str, Any], source: Path) -> None:
    saved: dict[str, object] = {"model_type": weights.manifest.model_type}
    numbered, drafting = (
        {int(found[1]) for name in weights.shapes if (found := pattern.search(name))}
        for pattern in (_LAYER, _DRAFTING_LAYER)
    )
    if layers := numbered - drafting:
        saved["num_hidden_layers"] = max(layers) + 1
    for name, shape in weights.shapes.items():
        if name.endswith("embed_tokens.weight") and len(shape) == 2:
            saved["vocab_size"], saved["hidden_size"] = shape

    def refuse(field: str, problem: str) -> NoReturn:
        remedy = "give the directory that the run began from, or a copy, as source"
        raise CheckpointError.at(source, f"{problem}; {remedy}", field=field)

    fields = {**text_config(config), "model_type": config.get("model_type")}
    for field in _FIELDS:
        found = fields.get(field)
        if found is None:
            unknown = f"so it is not known to be of the model in {weights.path}"
            refuse(field, f"is refused: its config.json has no {field}, {unknown}")
        if found != saved.get(field, found):
            other = f"the model in {weights.path} has {saved[field]!r}"
            refuse(field, f"is of another model: its config.json has {field}={found!r}, {other}")
    vocab_size, hidden_size = fields["vocab_size"], fields["hidden_size"]
    if (vocab_size, hidden_size) not in weights.shapes.values():
        sizes = f"vocab_size={vocab_size!r} and hidden_size={hidden_size!r}"
        other = f"the model in {weights.path} has no such weight"
        refuse("vocab_size", f"is of another model: its config.json has {sizes}, {other}")
