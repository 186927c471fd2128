"""Writing Hugging Face directories, shard by shard and all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rl_backend.checkpoint.hf_reader import SINGLE_FILE, WEIGHTS_INDEX, read_hf_config
from rl_backend.contracts import CheckpointError

DEFAULT_SHARD_BYTES = 5 * 2**30

_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf", ".onnx", ".nemo"),
    *(".h5", ".tflite", ".msgpack", ".npz", ".ot", ".pdparams"),
)


def write_hf_directory(
    path: Path | str,
    tensors: Iterator[tuple[str, Tensor]],
    source_dir: Path | str,
    *,
    config: Mapping[str, object] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a directory that transformers and vLLM load: weights, and the other files of ``source_dir``.

    Weights are written in shards as they come, so that one shard is in memory. ``config.json`` is told the dtype that was
    written. Everything goes to a hidden directory beside ``path``, is flushed to the disk, and appears under ``path`` in one
    rename; a failure leaves nothing behind.

    Args:
        path: must not exist; its parent must.
        tensors: Hugging Face name -> tensor on any device; each is copied before the next is taken.
        source_dir: the Hugging Face directory that the model came from; its configuration, tokenizer, chat templates,
            generation settings, model card and code are copied, its weights and other folders are not.
        config: written to ``config.json`` in place of that of ``source_dir``.
        max_shard_bytes: largest size of one file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: ``path`` exists or its parent does not, no ``config.json`` in ``source_dir``, no tensors, one name
            twice, or the disk is full.
    """
    target, source = Path(path), Path(source_dir)
    if target.exists():
        raise CheckpointError(f"{target} exists already; choose a new directory", path=str(target))
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is not a directory; create it first", path=str(target))
    written_config = read_hf_config(source) if config is None else config
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        temporary.mkdir()
        try:
            dtype = _write_shards(temporary, tensors, max_shard_bytes)
            _copy_other_files(source, temporary)
            _write_json(temporary / "config.json", _with_dtype(written_config, dtype))
            _flush(temporary)
            if target.exists():
                raise CheckpointError(f"{target} was created by another process meanwhile", path=str(target))
            temporary.rename(target)
            _flush_entry(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"writing {target} failed ({error}); nothing was left there", path=str(target)) from error


def _write_shards(directory: Path, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> torch.dtype:
    """Writes all shards and their index; returns the dtype of most elements."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    elements: Counter[torch.dtype] = Counter()
    seen: set[str] = set()
    pending_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        save_file(pending, _draft(directory, len(shards)), metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        pending_bytes = 0

    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"tensor {name!r} came twice", tensor=name)
        seen.add(name)
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        elements[tensor.dtype] += tensor.numel()
    if pending:
        flush()
    if not shards:
        raise CheckpointError("there are no tensors to write")
    _name_shards(directory, shards, total_bytes)
    return elements.most_common(1)[0][0]


def _name_shards(directory: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        _draft(directory, 0).rename(directory / SINGLE_FILE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _draft(directory, number).rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    _write_json(directory / WEIGHTS_INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _draft(directory: Path, number: int) -> Path:
    return directory / f"draft-{number}.safetensors"


def _copy_other_files(source: Path, directory: Path) -> None:
    for entry in source.iterdir():
        weights = entry.suffix in _WEIGHT_SUFFIXES or entry.name.endswith(".index.json")
        if entry.is_file() and not weights and not entry.name.startswith("."):
            shutil.copyfile(entry, directory / entry.name)
        elif entry.is_dir() and entry.name == "additional_chat_templates":
            shutil.copytree(entry, directory / entry.name)


def _with_dtype(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    name = str(dtype).removeprefix("torch.")
    fields = [field for field in ("dtype", "torch_dtype") if field in config] or ["dtype"]
    return {**config, **dict.fromkeys(fields, name)}


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _flush(directory: Path) -> None:
    for entry in directory.rglob("*"):
        _flush_entry(entry)
    _flush_entry(directory)


def _flush_entry(entry: Path) -> None:
    descriptor = os.open(entry, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
