"""Files of a checkpoint's tensors: their digests, what a full disk says, and what is read of them."""

from __future__ import annotations

import errno
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from rl_backend.checkpoint import training_state
from rl_backend.checkpoint.manifest import FileFacts
from rl_backend.checkpoint.training_state import (
    DigestingWriter,
    PiecesLoadPlanner,
    TensorPieces,
    TensorsReader,
    file_facts,
    require_written,
)
from rl_backend.contracts import CheckpointError
from tests.support.disk import full_disk
from tests.support.written_checkpoints import write_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def test_a_stream_has_the_facts_of_all_parts_that_were_written_and_a_renamed_file_keeps_them(tmp_path: Path) -> None:
    writer = DigestingWriter(tmp_path)
    parts = [b"first", memoryview(torch.arange(5, dtype=torch.int32).numpy()), bytearray(b"")]
    for name in ("a", "b"):
        with writer.fs.create_stream(tmp_path / name, "wb") as stream:
            for part in parts:
                stream.write(part)
            with pytest.raises(io.UnsupportedOperation, match="seek"):
                stream.seek(0)
        parts.append(b"more")
    whole = b"first" + torch.arange(5, dtype=torch.int32).numpy().tobytes()
    expected = FileFacts(num_bytes=25, xxh3=digest(whole))
    assert (tmp_path / "a").read_bytes() == whole
    assert writer.written == {"a": expected, "b": FileFacts(num_bytes=29, xxh3=digest(whole + b"more"))}
    writer.fs.rename(tmp_path / "a", tmp_path / "c")
    assert writer.written.keys() == {"b", "c"} and writer.written["c"] == expected
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["b", "c"]


@pytest.mark.parametrize("size", [5000, 100_000], ids=["in the buffer until it is closed", "beyond the buffer"])
@pytest.mark.parametrize("flushes", [False, True])
def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path, size: int, flushes: bool) -> None:
    writer, path = DigestingWriter(tmp_path), tmp_path / "__0_0.distcp"

    def write() -> None:
        with writer.fs.create_stream(path, "wb") as stream:
            stream.write(b"x" * size)
            if flushes:
                os.fsync(stream.fileno())

    with full_disk(True), pytest.raises(OSError, match="too large") as caught:
        write()
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert writer.written == {}
    with writer.fs.create_stream(path, "wb") as stream:
        stream.write(b"again")
    assert writer.written == {path.name: FileFacts(num_bytes=5, xxh3=digest(b"again"))}


def test_what_torch_says_of_a_full_disk_gives_way_to_the_disks_own_error(tmp_path: Path) -> None:
    writer, path = DigestingWriter(tmp_path), tmp_path / "data"
    with (
        full_disk(True),
        pytest.raises(OSError, match="too large") as caught,
        writer.fs.create_stream(path, "wb") as stream,
    ):
        torch.save(torch.zeros(100_000), stream)  # type: ignore[arg-type]
    assert caught.value.filename == str(path)


def test_an_error_of_the_caller_is_raised_as_it_is_and_leaves_no_facts(tmp_path: Path) -> None:
    writer = DigestingWriter(tmp_path)
    streams: list[io.IOBase] = []

    def write() -> None:
        with writer.fs.create_stream(tmp_path / "data", "wb") as stream:
            streams.append(stream)
            stream.write(b"few")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        write()
    assert writer.written == {} and streams[0].closed


@pytest.mark.parametrize(("limit", "read"), [(None, 10), (0, 0), (3, 3), (4, 4), (7, 7), (10, 10), (99, 10)])
def test_facts_are_of_the_first_bytes_whatever_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, read: int
) -> None:
    monkeypatch.setattr(training_state, "_CHUNK", 4)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert file_facts(tmp_path / "file", limit) == FileFacts(num_bytes=read, xxh3=digest(b"0123456789"[:read]))


def test_a_file_must_have_the_bytes_that_were_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"written")
    facts = FileFacts(num_bytes=7, xxh3=digest(b"written"))
    require_written(tmp_path, "file", facts)
    for other in (None, facts.replace(num_bytes=8), facts.replace(xxh3=digest(b"Written"))):
        with pytest.raises(
            CheckpointError, match=f"{tmp_path} is damaged: file has other bytes than were written"
        ) as caught:
            require_written(tmp_path, "file", other)
        assert caught.value.details == {"path": str(tmp_path), "name": "file"}
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is damaged: gone cannot be read \(.*No such file") as caught:
        require_written(tmp_path, "gone", facts)
    assert caught.value.details == {"path": str(tmp_path), "name": "gone"}


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Tensor]:
    """``first`` in three pieces of other sizes, ``second`` whole in bfloat16, ``count`` an integer."""
    whole = torch.arange(35.0).view(7, 5)
    pieces: dict[tuple[int, ...], Tensor] = {(0, 0): whole[:2], (2, 0): whole[2:, :3], (2, 3): whole[2:, 3:]}
    write_tensors(
        tmp_path / "saved",
        {
            "first": TensorPieces((7, 5), pieces),
            "second": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
            "count": torch.tensor(11),
        },
    )
    return tmp_path / "saved", whole


def reader_of(path: Path) -> TensorsReader:
    return TensorsReader(path, {file.name: file_facts(file) for file in path.iterdir()})


def test_stored_tensors_fill_others_of_any_float_and_any_pieces(stored: tuple[Path, Tensor]) -> None:
    path, whole = stored
    reader = reader_of(path)
    assert reader.read_metadata() is reader.metadata
    target, second, count = (
        torch.zeros(7, 5, dtype=torch.float64),
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros((), dtype=torch.int64),
    )
    state = {"first": TensorPieces((7, 5), {(1, 2): target[1:4, 2:]}), "second": second, "count": count}
    load(dict(state), storage_reader=reader, planner=PiecesLoadPlanner(), no_dist=True)
    expected = torch.zeros(7, 5, dtype=torch.float64)
    expected[1:4, 2:] = whole[1:4, 2:]
    assert torch.equal(target, expected)
    assert second.tolist() == [[0, 1, 2], [3, 4, 5]] and int(count) == 11


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "problem"),
    [
        ("first", (7, 5), torch.float32, None),
        ("first", (7, 5), torch.float16, None),
        ("second", (2, 3), torch.float64, None),
        ("count", (), torch.int64, None),
        ("count", (), None, None),
        ("third", (7, 5), torch.float32, r"does not have it, third was expected in shape \(7, 5\)"),
        ("first", (5, 7), torch.float32, r"has it in shape \(7, 5\), first was expected in shape \(5, 7\)"),
        ("second", (2, 3), torch.int64, "has it as bfloat16, second was expected as int64"),
        ("count", (), torch.float32, "has it as int64, count was expected as float32"),
        ("count", (), torch.int32, "has it as int64, count was expected as int32"),
    ],
)
def test_shape_and_dtype_are_checked_before_anything_is_read(
    stored: tuple[Path, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype | None, problem: str | None
) -> None:
    reader = reader_of(stored[0])
    if problem is None:
        reader.require_stored(name, shape, dtype)
        return
    with pytest.raises(
        CheckpointError, match=rf"{stored[0]} is damaged: its \.metadata {problem}; take an earlier"
    ) as caught:
        reader.require_stored(name, shape, dtype)
    assert caught.value.details == {"path": str(stored[0]), "name": name}


def test_the_second_of_two_files_is_read_and_named_where_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    write_tensors(path, {"a": torch.ones(3)})
    write_tensors(tmp_path / "other", {"b": torch.full((4,), 2.0)})
    # One checkpoint of two files, as of two ranks.
    (tmp_path / "other" / "__0_0.distcp").rename(path / "__1_0.distcp")
    with (tmp_path / "other" / ".metadata").open("rb") as stream, (path / ".metadata").open("rb") as own:
        theirs, metadata = pickle.load(stream), pickle.load(own)
    for place in theirs.storage_data.values():
        place.relative_path = "__1_0.distcp"
    metadata.state_dict_metadata |= theirs.state_dict_metadata
    metadata.storage_data |= theirs.storage_data
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    a, b = torch.zeros(3), torch.zeros(4)
    load({"a": a, "b": b}, storage_reader=reader_of(path), planner=PiecesLoadPlanner(), no_dist=True)
    assert a.tolist() == [1, 1, 1] and b.tolist() == [2, 2, 2, 2]
    (path / "__1_0.distcp").write_bytes(b"\0" * (path / "__1_0.distcp").stat().st_size)
    with pytest.raises(CheckpointException) as caught:
        load({"a": a, "b": b}, storage_reader=reader_of(path), planner=PiecesLoadPlanner(), no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert str(error).startswith(f"{path}/__1_0.distcp is refused, ") and "take an earlier checkpoint" in str(error)
    assert isinstance(error, CheckpointError) and error.details == {"path": str(path), "name": "__1_0.distcp"}
