"""Writing Hugging Face directories, shard by shard and all or nothing."""

from __future__ import annotations

import json
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from rl_backend.checkpoint.durable import rename_synced, sync_tree
from rl_backend.checkpoint.hf_other_files import other_files
from rl_backend.checkpoint.hf_reader import WEIGHTS_INDEX, read_hf_config
from rl_backend.checkpoint.hf_shards import ShardedFiles
from rl_backend.contracts import CheckpointError, TensorInfo

DEFAULT_SHARD_BYTES = 5 * 2**30


def write_hf_directory(
    path: Path | str,
    infos: Sequence[TensorInfo],
    tensors: Iterator[tuple[str, Tensor]],
    source_dir: Path | str,
    *,
    config: Mapping[str, object] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a directory that transformers and vLLM load: weights, and the other files of ``source_dir``.

    Weights are written in shards, one tensor after the other as they come, so that one tensor is in memory. ``config.json``
    is told the dtype of most elements. Everything goes to a hidden directory beside ``path``, is flushed to the disk, and
    appears under ``path`` in one rename; a failure leaves nothing behind.

    Args:
        path: must not exist; its parent must.
        infos: what ``tensors`` gives: Hugging Face names, shapes and dtypes, in the order in which files are filled.
        tensors: Hugging Face name -> tensor on any device; each is written before the next is taken.
        source_dir: the Hugging Face directory that the model came from; its configuration, tokenizer, chat templates,
            generation settings, model card and code are copied, and nothing else: see
            :func:`~rl_backend.checkpoint.hf_other_files.other_files`.
        config: written to ``config.json`` in place of that of ``source_dir``.
        max_shard_bytes: largest size of one file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: ``path`` exists or its parent does not, no ``config.json`` in ``source_dir``, a link in it that
            leads out, tensors that are not those of ``infos``, or the disk is full.
    """
    target, source = Path(path), Path(source_dir)
    if target.exists():
        raise CheckpointError(f"{target} exists already; choose a new directory", path=str(target))
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is not a directory; create it first", path=str(target))
    written_config = read_hf_config(source) if config is None else config
    copied = _other_files(source, target)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        temporary.mkdir()
        try:
            files = ShardedFiles(temporary, infos, max_shard_bytes)
            files.write(tensors)
            if len(set(files.weight_map.values())) > 1:
                content = {"metadata": {"total_size": files.total_bytes}, "weight_map": files.weight_map}
                _write_json(temporary / WEIGHTS_INDEX, content)
            for name, file in copied.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, temporary / name)
            _write_json(temporary / "config.json", _with_dtype(written_config, _usual_dtype(infos)))
            sync_tree(temporary)
            if target.exists():
                raise CheckpointError(f"{target} was created by another process meanwhile", path=str(target))
            rename_synced(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        left = "; ".join(getattr(error, "__notes__", ())) or "nothing was left there"
        raise CheckpointError(f"writing {target} failed ({error}); {left}", path=str(target)) from error


def _other_files(source: Path, target: Path) -> dict[str, Path]:
    try:
        return other_files(source)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read ({error}); nothing was written", path=str(target)) from error


def _usual_dtype(infos: Sequence[TensorInfo]) -> str:
    elements: Counter[str] = Counter()
    for info in infos:
        elements[info.dtype] += info.num_elements
    return elements.most_common(1)[0][0]


def _with_dtype(config: Mapping[str, object], dtype: str) -> dict[str, object]:
    fields = [field for field in ("dtype", "torch_dtype") if field in config] or ["dtype"]
    return {**config, **dict.fromkeys(fields, dtype)}


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
