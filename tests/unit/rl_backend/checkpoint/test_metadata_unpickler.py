"""``.metadata`` as it is read: what torch wrote comes through, and every part that cannot be is refused in words."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from rl_backend.checkpoint.metadata_unpickler import load_problem, may_run, stored_metadata
from rl_backend.checkpoint.training_state import TensorPieces, file_facts
from rl_backend.contracts import CheckpointError
from tests.support.written_checkpoints import write_tensors

DATA = "__0_0.distcp"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    whole = torch.arange(24.0).view(4, 6)
    pieces: dict[tuple[int, ...], Any] = {(0, 0): whole[:3], (3, 0): whole[3:, :2], (3, 2): whole[3:, 2:]}
    count = torch.tensor(3, dtype=torch.int32)
    write_tensors(tmp_path / "saved", {"matrix": TensorPieces((4, 6), pieces), "count": count})
    return tmp_path / "saved"


def read(path: Path) -> Any:
    return stored_metadata(path, {file.name: file_facts(file) for file in path.iterdir()})


def change(path: Path, edit: Callable[[Any], object]) -> None:
    with (path / ".metadata").open("rb") as stream:
        metadata = pickle.load(stream)
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_torch_wrote_is_read_as_torch_reads_it(saved: Path) -> None:
    found, theirs = read(saved), FileSystemReader(saved).read_metadata()
    assert found.storage_data == theirs.storage_data and len(found.storage_data) == 4
    assert found.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, tensor in found.state_dict_metadata.items():
        expected = theirs.state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata) and isinstance(expected, TensorStorageMetadata)
        assert (tensor.size, tensor.properties.dtype) == (expected.size, expected.properties.dtype)
        assert {(each.offsets, each.sizes) for each in tensor.chunks} == {
            (each.offsets, each.sizes) for each in expected.chunks
        }


def piece(offsets: Any, sizes: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def with_pieces(*pieces: ChunkStorageMetadata) -> Callable[[Any], object]:
    return lambda metadata: setattr(metadata.state_dict_metadata["matrix"], "chunks", list(pieces))


def with_place(**fields: Any) -> Callable[[Any], object]:
    """Changes where the last piece is, of the first tensor."""

    def edit(metadata: Any) -> None:
        place = metadata.storage_data[MetadataIndex("matrix", torch.Size([3, 2]))]
        for name, value in fields.items():
            setattr(place, name, value)

    return edit


def with_index(**fields: Any) -> Callable[[Any], object]:
    def edit(metadata: Any) -> None:
        index = next(iter(metadata.storage_data))
        place = metadata.storage_data.pop(index)
        for name, value in fields.items():
            object.__setattr__(index, name, value)
        metadata.storage_data[index] = place

    return edit


def of_matrix(**fields: Any) -> Callable[[Any], object]:
    def edit(metadata: Any) -> None:
        for name, value in fields.items():
            setattr(metadata.state_dict_metadata["matrix"], name, value)

    return edit


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (with_pieces(), r"is refused, the pieces of matrix overlap, or leave out a part of \(4, 6\)"),
        (with_pieces(piece((0, 0), (3, 6))), r"leave out a part of \(4, 6\)"),
        (with_pieces(piece((0, 0), (4, 6)), piece((3, 0), (1, 6))), "overlap"),
        (with_pieces(piece((0, 0), (4, 6)), piece((3, 2), (1, 4))), "the pieces of matrix overlap"),
        (with_pieces(piece((0, 0), (5, 6))), r"matrix has a piece of \(5, 6\) at \(0, 0\), outside of \(4, 6\)"),
        (with_pieces(piece((0, 1), (4, 6))), r"matrix has a piece of \(4, 6\) at \(0, 1\), outside of \(4, 6\)"),
        (with_pieces(piece((0,), (4,))), r"matrix has a piece of \(4,\) at \(0,\), outside"),
        (with_pieces(piece((0, 0), (4,))), r"matrix has a piece of \(4,\) at \(0, 0\), outside"),
        (with_pieces(piece((0, 0), (4, 6)), piece((4, 0), (0, 6))), r"no place for the piece of matrix at \(4, 0\)"),
        (with_place(relative_path="other"), r"places tensors in 'other', which is no file of this checkpoint"),
        (with_place(relative_path=".metadata"), r"places tensors in '\.metadata', which is no file of this checkpoint"),
        (with_place(relative_path=3), "it has a int in the place of a str"),
        (with_place(length=10**6), rf"places a tensor behind the end of {DATA}"),
        (with_place(offset=-1), "it has int -1 in the place of a count"),
        (with_place(offset=True), "it has bool True in the place of a count"),
        (with_place(length=2**63), "it has int a number beyond 64 bits in the place of a count"),
        (with_place(length="a" * 90), "it has str 'a{39} in the place of a count"),
        (with_place(transform_descriptors=["zip"]), rf"it wants a list to be applied to {DATA}"),
        (with_index(index="first"), "it has str 'first' in the place of a count"),
        (with_index(offset=(0, 0)), "it has a tuple in the place of a Size"),
        (with_index(fqn=None), "it has a NoneType in the place of a str"),
        (of_matrix(properties=None), "it has a NoneType in the place of a TensorProperties"),
        (of_matrix(size=[4, 6]), "it has a list in the place of a Size"),
        (of_matrix(chunks=()), "it has a tuple in the place of a list"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", []), "it has a list in the place of a dict"),
        (lambda metadata: setattr(metadata, "storage_data", None), "it has a NoneType in the place of a dict"),
        (
            lambda metadata: metadata.state_dict_metadata.update(matrix=piece((0,), (1,))),
            "it has a ChunkStorageMetadata in the place of a TensorStorageMetadata",
        ),
    ],
)
def test_a_part_that_no_save_would_have_written_is_refused_in_words(
    saved: Path, edit: Callable[[Any], object], problem: str
) -> None:
    change(saved, edit)
    with pytest.raises(
        CheckpointError, match=rf"{saved} is damaged: its \.metadata .*{problem}.*; take an earlier"
    ) as caught:
        read(saved)
    assert caught.value.details == {"path": str(saved), "name": ".metadata"}


def test_an_index_without_place_or_number_and_a_piece_at_the_very_end_are_taken(saved: Path) -> None:
    end = (saved / DATA).stat().st_size
    change(saved, with_place(offset=end, length=0))
    change(
        saved,
        lambda metadata: metadata.storage_data.update({MetadataIndex("more"): next(iter(metadata.storage_data.values()))}),
    )
    found = read(saved)
    assert found.storage_data[MetadataIndex("matrix", torch.Size([3, 2]))].offset == end
    assert found.storage_data[MetadataIndex("more")].relative_path == DATA


def test_a_metadata_that_is_missing_unlisted_or_no_pickle_is_named(saved: Path) -> None:
    facts = {file.name: file_facts(file) for file in saved.iterdir()}
    with pytest.raises(CheckpointError, match=r"\.metadata is refused, the manifest does not list \.metadata"):
        stored_metadata(saved, {DATA: facts[DATA]})
    (saved / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"its \.metadata is refused, EOFError"):
        stored_metadata(saved, facts)
    (saved / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(CheckpointError, match=r"is refused, it has a list in the place of a Metadata"):
        stored_metadata(saved, facts)
    (saved / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"its \.metadata is refused, FileNotFoundError: .*No such file"):
        stored_metadata(saved, facts)


def test_a_dtypes_name_in_another_module_is_a_name_like_any_other(saved: Path) -> None:
    (saved / ".metadata").write_bytes(b"cother\nfloat32\n.")
    with pytest.raises(
        CheckpointError, match=r"is refused: its \.metadata asks for other\.float32, which may run"
    ) as caught:
        read(saved)
    assert caught.value.details["name"] == ".metadata"
    (saved / ".metadata").write_bytes(b"ctorch\nfloat31\n.")
    with pytest.raises(CheckpointError, match=r"asks for torch\.float31, which may run commands; nothing of it was run"):
        read(saved)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("it is short", "ValueError: it is short"),
        ("\n  \nfirst\nsecond", "ValueError: first"),
        ("set `weights_only` to False\nbroken", "ValueError: broken"),
        ("set `weights_only` to False", "ValueError: it holds more than tensors"),
        ("", "ValueError: it holds more than tensors"),
        ("Unsupported global: GLOBAL os.system was not an allowed global", f"it {may_run('os.system')}"),
        ("line\nunsupported GLOBAL a.b whose module", f"it {may_run('a.b')}"),
    ],
)
def test_a_problem_of_a_load_is_told_in_one_line_without_torchs_advice(text: str, problem: str) -> None:
    assert load_problem(ValueError(text)) == problem
