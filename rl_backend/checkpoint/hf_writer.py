"""Writing Hugging Face directories, shard by shard and all or nothing."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_backend.checkpoint.confined import require_inside_model
from rl_backend.checkpoint.durable_commit import new_directory, require_new
from rl_backend.checkpoint.hf_reader import SINGLE_FILE, TORCH_DTYPES, WEIGHTS_INDEX, other_files, read_hf_config
from rl_backend.checkpoint.kept_weights import open_kept
from rl_backend.checkpoint.quantisation import mxfp4_config, without_quantisation
from rl_backend.contracts import CheckpointError, TensorInfo, dtype_from_name, name_of_dtype, text_config

# torch's name of a dtype -> that of safetensors.
_DTYPES = {name_of_dtype(dtype): name for name, dtype in TORCH_DTYPES.items()}
_ALIGNMENT = 8
_PART = 1 << 24
_LABEL = "LABEL_0"
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_TASK = re.compile(r"(?<=\w)For[A-Z]\w*$|(?<=\w)(LMHead)?Model$")
DEFAULT_SHARD_BYTES = 5 * 2**30


def write_hf_directory(
    path: Path | str,
    infos: Sequence[TensorInfo],
    tensors: Iterator[tuple[str, Tensor]],
    source_dir: Path | str,
    *,
    config: Mapping[str, object] | None = None,
    mxfp4: bool = False,
    kept: Mapping[str, tuple[int, ...]] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a directory that transformers and vLLM load: weights, and the other files of ``source_dir``.

    Only one tensor at a time is in memory. ``config.json`` gets the dtype of most elements of ``infos``, and no
    ``quantization_config`` unless ``mxfp4``. ``path`` appears complete or not at all.

    Args:
        path: must not exist; its parent must.
        infos: of ``tensors``: Hugging Face names, shapes and dtypes, in the order in which files are filled.
        tensors: Hugging Face name -> tensor on any device; each is written before the next is taken.
        source_dir: the Hugging Face directory that the model came from, of which
            :func:`~rl_backend.checkpoint.hf_reader.other_files` are copied.
        config: in place of that of ``source_dir``.
        mxfp4: ``tensors`` have experts in MXFP4, from :func:`~rl_backend.checkpoint.quantisation.in_mxfp4`.
        kept: name -> shape of tensors of ``source_dir`` that are copied byte for byte beside ``tensors``.
        max_shard_bytes: largest size of one file; a larger tensor gets its own file.

    Raises:
        CheckpointError: ``path`` exists or its parent does not, ``source_dir`` is gone or lacks ``config.json`` or a tensor
            of ``kept``, a link in it that leads out, tensors that are not those of ``infos``, or the disk is full.
    """
    target, source = Path(path), Path(source_dir)
    require_new(target)
    source_config = read_hf_config(source)
    kept_infos, kept_tensors = open_kept(source, kept or {})
    try:
        with new_directory(target) as draft:
            written = [*infos, *kept_infos]
            places = lay_out_files(draft, written, max_shard_bytes)
            write_tensors(places, chain(tensors, kept_tensors))
            weight_map = {name: place.file.name for name, place in places.items()}
            if len(set(weight_map.values())) > 1:
                content = {"metadata": {"total_size": sum(info.nbytes for info in written)}, "weight_map": weight_map}
                _write_json(draft / WEIGHTS_INDEX, content)
            for name, file in other_files(source).items():
                (draft / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, draft / name)
            described = (mxfp4_config if mxfp4 else without_quantisation)(source_config if config is None else config)
            new_config = _with_usual_dtype(described, infos)
            if new_config == source_config:
                shutil.copyfile(require_inside_model(source, "config.json"), draft / "config.json")
            else:
                _write_json(draft / "config.json", new_config)
    except OSError as error:
        left = "; ".join(getattr(error, "__notes__", ())) or "nothing was left there"
        raise CheckpointError(f"writing {target} failed ({error}); {left}", path=str(target)) from error


def _with_usual_dtype(config: Mapping[str, object], infos: Sequence[TensorInfo]) -> dict[str, object]:
    elements: Counter[str] = Counter()
    for info in infos:
        if dtype_from_name(info.dtype).is_floating_point:
            elements[info.dtype] += info.num_elements
    usual = elements.most_common(1)[0][0]

    def changed(part: Mapping[str, object]) -> dict[str, object]:
        return {**part, **{field: usual for field in _DTYPE_FIELDS if field in part}}

    # Of the language model alone: its other parts are as they were.
    text, written = text_config(config), changed(config)
    if text is not config:
        written["text_config"] = changed(text)
    says = any(field in part for part in (config, text) for field in _DTYPE_FIELDS)
    return written if says else {**written, "dtype": usual}


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Place(NamedTuple):
    """Where a tensor is written: ``start`` is its first byte in ``file``."""

    file: Path
    start: int
    info: TensorInfo


def lay_out_files(directory: Path, infos: Sequence[TensorInfo], max_shard_bytes: int) -> dict[str, Place]:
    """Makes the weight files of a model, with their headers: name -> place of each of ``infos``, in their order."""
    places: dict[str, Place] = {}
    shards = list(_shards(infos, max_shard_bytes))
    for number, shard in enumerate(shards, start=1):
        file = directory / (SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # The order of the safetensors library, in which every tensor of a mapped file begins at a multiple of its itemsize.
        # Readers compute on the mapped memory, and another place of a tensor can change the last bit of what they get.
        for info in sorted(shard, key=lambda info: (-dtype_from_name(info.dtype).itemsize, info.name)):
            starts[info.name] = end
            header[info.name] = {
                "dtype": _DTYPES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [end, end + info.nbytes],
            }
            end += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        places |= {info.name: Place(file, 8 + len(text) + starts[info.name], info) for info in shard}
    return places


def write_tensors(places: Mapping[str, Place], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Writes each tensor to its place before the next is taken.

    Raises:
        CheckpointError: one comes twice, is not as announced, or does not come.
        OSError: the disk is full.
    """
    missing = dict(places)
    for name, tensor in tensors:
        place, found = missing.pop(name, None), f"{name_of_dtype(tensor.dtype)} {tuple(tensor.shape)}"
        announced = f"{place.info.dtype} {place.info.shape}" if place else "nothing more of this name"
        if place is None or found != announced:
            raise CheckpointError(f"tensor {name!r} came as {found}, {announced} was announced", tensor=name)
        file, start, _ = place
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with file.open("r+b") as stream:
            stream.seek(start)
            for part in data.split(_PART) if data.numel() else ():
                # NumPy takes a tensor's memory for itself: a parameter's could not be offloaded any more.
                stream.write(memoryview(part.to("cpu", copy=True).numpy()))
    if missing:
        name = next(iter(missing))
        raise CheckpointError(f"{len(missing)} of {len(places)} tensors did not come, {name!r} for one", tensor=name)


def _shards(infos: Sequence[TensorInfo], max_shard_bytes: int) -> Iterator[list[TensorInfo]]:
    shard: list[TensorInfo] = []
    size = 0
    for info in infos:
        if shard and size + info.nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(info)
        size += info.nbytes
    yield shard


def critic_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a critic that starts from the model of ``hf_config``."""
    # transformers' AutoModelForTokenClassification reads it: one label, and, as in training, no dropout before the head.
    config = {name: value for name, value in hf_config.items() if name not in ("num_labels", "problem_type")}
    architectures = [_TASK.sub("", name) + "ForTokenClassification" for name in hf_config.get("architectures") or ()]
    if architectures:
        config["architectures"] = architectures
    return {**config, "id2label": {"0": _LABEL}, "label2id": {_LABEL: 0}, "classifier_dropout": 0.0}
