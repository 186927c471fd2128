"""Checkpoints that somebody has made to run a command, to read other files or to be loaded in part, with seals that fit."""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

from actors.folder.checkpoints import RUN_FILE, RunManifest
from rl_backend.checkpoint.manifest import MANIFEST_NAME, FileFacts, TrainingManifest
from rl_backend.checkpoint.training_state import file_facts


class Command:
    """Unpickled, it makes the file ``mark``."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


def hostile_metadata(checkpoint: Path, mark: Path) -> str:
    """``.metadata`` runs a command and is nothing else."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Command(mark)))
    return r"\.metadata asks for (posix|os)\.system"


def hostile_field(checkpoint: Path, mark: Path) -> str:
    """``.metadata`` is what it was, but for a field that nobody reads."""
    with (checkpoint / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    metadata.planner_data = [Command(mark)]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return r"\.metadata asks for (posix|os)\.system"


def hostile_builtins(checkpoint: Path, mark: Path) -> str:
    """``eval`` by the names of the oldest protocol."""
    (checkpoint / ".metadata").write_bytes(b"c__builtin__\neval\n(V__import__('os').system('touch %b')\ntR." % bytes(mark))
    return r"\.metadata asks for (__builtin__|builtins)\.eval"


def hostile_attribute(checkpoint: Path, mark: Path) -> str:
    """Sets an attribute of a class that the file may name."""
    (checkpoint / ".metadata").write_bytes(
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(N}V__hash__\nctorch\nSize\nstb."
    )
    return r"\.metadata is refused, TypeError"


def hostile_object(checkpoint: Path, mark: Path) -> str:
    """A weight is declared to be an object, which ``torch.distributed.checkpoint`` unpickles without limits."""
    with (checkpoint / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    name = next(name for name in metadata.state_dict_metadata if name.startswith("model."))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    stored = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
    metadata.storage_data = {
        **{index: place for index, place in metadata.storage_data.items() if index.fqn != name},
        MetadataIndex(name): stored,
    }
    _put_archive(checkpoint / stored.relative_path, mark)
    stored.offset, stored.length = 0, (checkpoint / stored.relative_path).stat().st_size
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return r"\.metadata asks for torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"


def hostile_tensor(checkpoint: Path, mark: Path) -> str:
    """The data of weights are archives of ``torch.save`` whose pickle runs a command."""
    with (checkpoint / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    for file in checkpoint.glob("*.distcp"):
        _put_archive(file, mark)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (checkpoint / place.relative_path).stat().st_size
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return r"__0_0\.distcp is refused, it asks for (posix|os)\.system"


def hostile_place(checkpoint: Path, mark: Path) -> str:
    """Weights are said to be in a file elsewhere."""
    with (checkpoint / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    for place in metadata.storage_data.values():
        place.relative_path = f"../{checkpoint.name}/{place.relative_path}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return r"places tensors in '\.\./\w+/__\d_0\.distcp', which is no file of this checkpoint"


def _falsify(checkpoint: Path, change: Callable[[Metadata, str], object]) -> str:
    """Has ``change`` alter ``.metadata``; its second argument is the name of the embeddings, a matrix in one piece."""
    with (checkpoint / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    name = "model.model.embed_tokens.weight"
    change(metadata, name)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return re.escape(name)


def false_half(checkpoint: Path) -> str:
    """A half of a weight has no piece."""

    def change(metadata: Metadata, name: str) -> None:
        tensor = metadata.state_dict_metadata[name]
        tensor.chunks = [_piece(0, tensor.size[0] // 2, tensor.size[1])]

    return rf"the pieces of {_falsify(checkpoint, change)} overlap, or leave out a part of \(128, 64\)"


def false_nothing(checkpoint: Path) -> str:
    """A weight has no pieces."""
    name = _falsify(checkpoint, lambda metadata, name: metadata.state_dict_metadata[name].chunks.clear())
    return rf"the pieces of {name} overlap, or leave out a part"


def false_overlap(checkpoint: Path) -> str:
    """One half of a weight has two pieces, the other none."""

    def change(metadata: Metadata, name: str) -> None:
        tensor = metadata.state_dict_metadata[name]
        tensor.chunks = [_piece(0, tensor.size[0] // 2, tensor.size[1])] * 2

    return rf"the pieces of {_falsify(checkpoint, change)} overlap, or leave out a part"


def false_place(checkpoint: Path) -> str:
    """The piece of a weight is nowhere."""

    def change(metadata: Metadata, name: str) -> None:
        metadata.storage_data = {index: place for index, place in metadata.storage_data.items() if index.fqn != name}

    return rf"has no place for the piece of {_falsify(checkpoint, change)} at \(0, 0\)"


def false_whole_dtype(checkpoint: Path) -> str:
    """A weight is said to be integers."""

    def change(metadata: Metadata, name: str) -> None:
        metadata.state_dict_metadata[name].properties.dtype = torch.int8

    return rf"has it as int8, {_falsify(checkpoint, change)} was expected as float32"


def false_dtype(checkpoint: Path) -> str:
    """A weight is said to be rounded."""

    def change(metadata: Metadata, name: str) -> None:
        metadata.state_dict_metadata[name].properties.dtype = torch.bfloat16

    name = _falsify(checkpoint, change)
    return rf"has float32 \(128, 64\) of {name} where \.metadata says bfloat16 \(128, 64\)"


def false_shape(checkpoint: Path) -> str:
    """A weight is said to be smaller than the model's."""

    def change(metadata: Metadata, name: str) -> None:
        tensor = metadata.state_dict_metadata[name]
        tensor.size = torch.Size([64, 64])
        tensor.chunks = [_piece(0, 64, 64)]

    return rf"has it in shape \(64, 64\), {_falsify(checkpoint, change)} was expected in shape \(128, 64\)"


def false_data(checkpoint: Path) -> str:
    """The pieces of two weights of other sizes stand for each other."""

    def change(metadata: Metadata, name: str) -> None:
        other = next(index for index in metadata.storage_data if index.fqn == "model.model.norm.weight")
        own = next(index for index in metadata.storage_data if index.fqn == name)
        metadata.storage_data[own] = metadata.storage_data[other]

    name = _falsify(checkpoint, change)
    return rf"has float32 \(64,\) of {name} where \.metadata says float32 \(128, 64\)"


def false_count(checkpoint: Path) -> str:
    """A length has more digits than Python writes."""

    def change(metadata: Metadata, name: str) -> None:
        for place in metadata.storage_data.values():
            place.length = -(10**5000)

    _falsify(checkpoint, change)
    return r"has int a number beyond 64 bits in the place of a count"


FALSE = [
    *(false_half, false_nothing, false_overlap, false_place),
    *(false_whole_dtype, false_dtype, false_shape, false_data, false_count),
]
FOUND_WHILE_READING = [hostile_tensor, false_dtype, false_data]
"""Those that only the data itself shows: a load of them has begun."""

HOSTILE = [
    *(hostile_metadata, hostile_field, hostile_builtins, hostile_attribute),
    *(hostile_object, hostile_tensor, hostile_place),
]


def hostile_source(checkpoint: Path, folder: Path) -> None:
    """The manifest says that the model began from another folder of the machine."""
    manifest = TrainingManifest.read_sealed(checkpoint / MANIFEST_NAME)
    changed = manifest.replace(runtime_config={**manifest.runtime_config, "hf_path": str(folder)})
    (checkpoint / MANIFEST_NAME).write_text(changed.sealed_text())


def reseal(checkpoint: Path) -> None:
    """Digests of a model's checkpoint as they must be, and of the run's that it is in."""
    _reseal(checkpoint, MANIFEST_NAME, TrainingManifest)
    if (checkpoint.parent / RUN_FILE).exists():
        _reseal(checkpoint.parent, RUN_FILE, RunManifest)


def _reseal(folder: Path, name: str, kind: type[TrainingManifest] | type[RunManifest]) -> None:
    manifest = kind.read_sealed(folder / name)
    files = {file: file_facts(folder / file) for file in manifest.files}
    (folder / name).write_text(manifest.replace(files=files).sealed_text())


def with_files(folder: Path, name: str, kind: type[TrainingManifest] | type[RunManifest], files: Mapping[str, Path]) -> None:
    """Adds names to a manifest with the facts of the files that they lead to; none is checked here."""
    manifest = kind.read_sealed(folder / name)
    facts = {
        file: file_facts(target) if target.is_file() else FileFacts(num_bytes=0, xxh3="") for file, target in files.items()
    }
    whole = manifest.model_copy(update={"files": {**manifest.files, **facts}, "digest": ""})
    text = whole.model_dump_json(indent=1)
    seal = xxhash.xxh3_64_hexdigest(text.encode())
    (folder / name).write_text(text.replace('"digest": ""', f'"digest": "{seal}"', 1))


def _piece(start: int, rows: int, columns: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([rows, columns]))


def _put_archive(file: Path, mark: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Command(mark), protocol=2))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    file.write_bytes(data.getvalue())
