"""Training state as ``torch.distributed.checkpoint`` directories for any number of ranks, in files digested as written."""

import io
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from rl_backend.checkpoint.confined import require_inside
from rl_backend.checkpoint.durable_commit import commit_draft, discard_draft, draft_of, sync, with_notes, write_synced
from rl_backend.checkpoint.host_memory import HostMemory
from rl_backend.checkpoint.manifest import MANIFEST_NAME, FileFacts, TrainingManifest, damaged
from rl_backend.checkpoint.metadata_unpickler import METADATA_FILE, load_problem, stored_metadata
from rl_backend.contracts import CheckpointError, RLBackendError, name_of_dtype
from rl_backend.parallel.collectives import gather_objects

WEIGHTS = "model."
MOMENTS = {kind: f"optimizer.{kind}." for kind in ("exp_avg", "exp_avg_sq")}
"""AdamW's moment -> what the names of its tensors begin with; they end with the Hugging Face name of the weight."""
RANDOM = "random."
"""Names of random state begin with it and end with the rank; one that a checkpoint does not have stays as it is."""

_CHUNK = 1 << 22


class _DigestingFile(io.BufferedWriter):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._digest = xxhash.xxh3_64()
        self._size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        with self._noted():
            return super().write(data)

    def flush(self) -> None:
        with self._noted():
            super().flush()

    @contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            raise

    # Bytes that are digested cannot be changed any more.
    def seek(self, *args: Any) -> NoReturn:
        raise io.UnsupportedOperation("seek")

    def fileno(self) -> int:
        # The caller is about to flush the file to the disk.
        self.flush()
        return super().fileno()

    def facts(self) -> FileFacts:
        return FileFacts(num_bytes=self._size, xxh3=self._digest.hexdigest())


class _DigestingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        assert mode == "wb", "a FileSystemWriter only writes"
        stream = _DigestingFile(path)
        try:
            # Closing writes what the buffer holds: a full disk may show there first, or once more.
            with stream:
                yield stream
        except Exception:
            # torch.save still ends its archive, and then reports that instead.
            if stream.error is not None:
                raise OSError(stream.error.errno, stream.error.strerror, str(path)) from None
            raise
        self.written[Path(path).name] = stream.facts()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class DigestingWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that keeps size and digest of the bytes of this rank's files as it hands them on."""

    def __init__(self, path: Path) -> None:
        # Copying ahead waits for the current CUDA stream, which in another thread is another device's, or training's.
        super().__init__(path, per_thread_copy_ahead=0)
        self.fs = files = _DigestingFileSystem()
        self.written = files.written


def file_facts(file: Path, limit: int | None = None) -> FileFacts:
    """Size and digest of a file, or of its first ``limit`` bytes, read in pieces."""
    digest, size = xxhash.xxh3_64(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK if limit is None else min(limit - size, _CHUNK)):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(num_bytes=size, xxh3=digest.hexdigest())


def require_written(path: Path, name: str, facts: FileFacts | None) -> None:
    """Raises :class:`CheckpointError` unless ``name`` in the checkpoint ``path`` has the bytes that were written."""
    problem = f"{name} has other bytes than were written"
    try:
        found = file_facts(path / name)
    except OSError as error:
        found, problem = None, f"{name} cannot be read ({error})"
    if found != facts:
        raise damaged(path, name, problem)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorsReader(FileSystemReader):
    """Reads the tensors of a checkpoint from ``files``, those of its manifest. Nothing in a file is run.

    Every piece is checked against ``.metadata``; see :func:`~rl_backend.checkpoint.metadata_unpickler.stored_metadata`.
    """

    def __init__(self, path: Path, files: Mapping[str, FileFacts]) -> None:
        super().__init__(path)
        self.metadata = stored_metadata(path, files)
        self._sizes = {
            MetadataIndex(name, chunk.offsets): chunk.sizes
            for name, tensor in self.metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def require_stored(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        """Raises :class:`CheckpointError` unless a tensor of this shape is stored in ``dtype``, or converts to it."""
        stored = self.metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            self._refuse(name, "does not have it", f"in shape {shape}")
        if tuple(stored.size) != shape:
            self._refuse(name, f"has it in shape {tuple(stored.size)}", f"in shape {shape}")
        found = stored.properties.dtype
        # Floating dtypes convert to each other.
        if dtype is not None and found != dtype and not (found in _FLOATS and dtype in _FLOATS):
            self._refuse(name, f"has it as {name_of_dtype(found)}", f"as {name_of_dtype(dtype)}")

    def _refuse(self, name: str, found: str, expected: str) -> NoReturn:
        raise damaged(Path(self.path), name, f"its {METADATA_FILE} {found}, {name} was expected {expected}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        stored: dict[MetadataIndex, _StorageInfo] = self.metadata.storage_data
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(stored[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            file = require_inside(Path(self.path), name)
            try:
                with file.open("rb") as stream:
                    for item in items:
                        piece = self._piece(stream, item.storage_index, stored[item.storage_index])
                        fill(planner, item, piece)
            except Exception as error:
                raise CheckpointError(
                    f"{file} is refused, {load_problem(error)}; take an earlier checkpoint", path=str(self.path), name=name
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, stream: IO[bytes], index: MetadataIndex, place: _StorageInfo) -> Tensor:
        piece: Tensor = torch.load(self._slice_file(stream, place), map_location="cpu", weights_only=True)
        told = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(told, TensorStorageMetadata), "others are refused when they are converted"
        expected = _described(told.properties.dtype, self._sizes[index])
        found = _described(piece.dtype, piece.shape) if isinstance(piece, Tensor) else str(type(piece))
        if found != expected:
            raise ValueError(f"it has {found} of {index.fqn} where {METADATA_FILE} says {expected}")
        return piece


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{name_of_dtype(dtype)} {tuple(shape)}"


def fill(planner: LoadPlanner, item: ReadItem, piece: Tensor) -> None:
    """Copies the part of a stored piece that a planner asks for to where it belongs."""
    part = zip(item.storage_offsets, item.lengths, strict=True)
    target = planner.resolve_tensor(item)
    target.detach().copy_(piece[tuple(slice(start, start + length) for start, length in part)])
    planner.commit_tensor(item, target)


class TensorPieces:
    """The pieces of one tensor that this rank has. ``torch.distributed.checkpoint`` takes it in place of a tensor.

    Args:
        size: of the whole tensor.
        pieces: offsets of each piece -> the piece, a view of the tensor to save or to load.
        writes: False for a copy of what another rank writes: it is only loaded.
    """

    def __init__(self, size: Sequence[int], pieces: dict[tuple[int, ...], Tensor], *, writes: bool = True) -> None:
        self.whole_size = Size(size)
        self.pieces = pieces
        self.writes = writes

    def piece(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, "every item of pieces has an offset"
        return self.pieces[tuple(index.offset)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=Size(offsets), sizes=piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.whole_size,
                ),
            )
            for offsets, piece in self.pieces.items()
            if self.writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=Size(offsets), sizes=piece.size()) for offsets, piece in self.pieces.items()]


class PiecesSavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.piece(index) if isinstance(found, TensorPieces) else super().lookup_object(index)


class PiecesLoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default planner replaces everything but tensors by None, and looks for nested dictionaries.
        self.flatten_state_dict = False
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.piece(index) if isinstance(found, TensorPieces) else super().lookup_tensor(index)


type StateTensors = Mapping[str, Tensor | TensorPieces]


class HostBuffers:
    """Host memory for one model's state on ``device``."""

    # Kept from one copy to the next: writing to fresh memory takes several times as long.
    def __init__(self, device: torch.device) -> None:
        self._memory = HostMemory(device)

    def copy(self, tensors: StateTensors) -> dict[str, Tensor | TensorPieces]:
        """Copies, valid until the next call. Pieces that another rank writes are left out."""
        found = {
            name: tensor.pieces if isinstance(tensor, TensorPieces) else {(): tensor.detach()}
            for name, tensor in tensors.items()
            if not isinstance(tensor, TensorPieces) or tensor.writes
        }
        pieces = [piece for each in found.values() for piece in each.values()]
        places = iter(self._memory.take([piece.nbytes for piece in pieces]))
        copied = {
            name: {offsets: _copied(piece, next(places)) for offsets, piece in each.items()} for name, each in found.items()
        }
        for device in {piece.device for piece in pieces if piece.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        return {
            name: TensorPieces(tensor.whole_size, copied.get(name, {}), writes=tensor.writes)
            if isinstance(tensor, TensorPieces)
            else copied[name][()]
            for name, tensor in tensors.items()
        }


def _copied(tensor: Tensor, place: Tensor) -> Tensor:
    return place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def raise_on_every_rank(
    problem: str | None,
    group: dist.ProcessGroup,
    cause: BaseException | None = None,
    kind: type[RLBackendError] = CheckpointError,
) -> None:
    """A collective over ``group`` (gloo): raises ``kind`` on every rank if any rank has a problem, here from ``cause``."""
    problems = gather_objects(problem, group)
    found = {rank: text for rank, text in enumerate(problems) if text is not None}
    if found:
        distinct = dict.fromkeys(found.values())
        where = "" if len(found) == len(problems) else f" (on rank {', '.join(map(str, found))})"
        raise kind("; ".join(distinct) + where, ranks=sorted(found)) from cause


@contextmanager
def on_every_rank(group: dist.ProcessGroup, failed: str, kind: type[RLBackendError] = CheckpointError) -> Iterator[None]:
    """Ends its body with a collective over ``group`` (gloo): what fails on one rank is an error on every rank.

    The message begins with ``failed``, unless the body raises one of ``kind`` with its own.
    """
    problem: str | None = None
    cause: Exception | None = None
    try:
        yield
    except kind as error:
        problem, cause = error.message, error
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        reason = with_notes(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        problem, cause = f"{failed}: {reason}", error
    raise_on_every_rank(problem, group, cause, kind)


def require_free(path: Path) -> None:
    if path.exists():
        raise CheckpointError.at(path, "exists; a checkpoint is written to a new directory, choose another path")


def reserve_draft(path: Path, group: dist.ProcessGroup) -> Path:
    """Checks that ``path`` is free and makes a draft of it. A collective over ``group``; errors are raised on every rank."""
    drafts = [draft_of(path)]
    with on_every_rank(group, f"cannot make a directory beside {path}"):
        if dist.get_rank(group) == 0:
            require_free(path)
            drafts[0].mkdir(parents=True)
    dist.broadcast_object_list(drafts, group_src=0, group=group)
    return drafts[0]


def write_training_state(
    draft: Path, path: Path, tensors: StateTensors, manifest: TrainingManifest, group: dist.ProcessGroup
) -> None:
    """Writes every rank's part and the manifest into ``draft``, then renames it to ``path``. A collective.

    ``tensors`` of one name must be equal on all ranks, or pieces of one tensor. Where a rank cannot write,
    :class:`CheckpointError` is raised on every rank, and ``path`` does not exist.
    """
    first = dist.get_rank(group) == 0
    writer = DigestingWriter(draft)
    try:
        with told_as_checkpoint_error(f"{path} could not be written", group):
            save(dict(tensors), storage_writer=writer, planner=PiecesSavePlanner(), process_group=group)
        parts: list[dict[str, FileFacts]] = [{}] * dist.get_world_size(group)
        dist.gather_object(writer.written, parts if first else None, group=group, group_dst=0)
        with on_every_rank(group, f"cannot complete {path}"):
            if first:
                files = {name: facts for part in parts for name, facts in sorted(part.items())}
                write_synced(draft / MANIFEST_NAME, manifest.replace(files=files).sealed_text())
                sync(draft)
                commit_draft(draft, path)
    except BaseException:
        if first:
            discard_draft(draft)
        raise


def read_training_state(reader: TensorsReader, tensors: StateTensors, group: dist.ProcessGroup) -> None:
    """Fills ``tensors`` in place; a collective. They are partly filled where :class:`CheckpointError` is raised, on all."""
    with told_as_checkpoint_error(f"{reader.path} could not be read", group):
        load(dict(tensors), storage_reader=reader, planner=PiecesLoadPlanner(), process_group=group)


@contextmanager
def told_as_checkpoint_error(failed: str, group: dist.ProcessGroup | None = None) -> Generator[None]:
    """Turns torch's error of a save or load into a :class:`CheckpointError` that begins with ``failed``."""
    try:
        yield
    except CheckpointException as error:
        own = error.failures.get(dist.get_rank(group) if group is not None else 0)
        # torch counts an interrupt of this process, in the middle of a read or a write, among the failures.
        if own is not None and not isinstance(own[0], Exception):
            raise own[0] from None
        causes = (f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in error.failures.items())
        raise CheckpointError(f"{failed}: {'; '.join(causes)}") from error


class Box(NamedTuple):
    """A rectangle of a tensor; its elements follow each other from ``start`` in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements ``start`` to ``end`` of a flattened tensor as rectangles, at most ``2 * len(shape) - 1``, in order."""
    if start >= end:
        return
    if not shape:
        yield Box((), (), start)
        return
    inner = shape[1:]
    row = math.prod(inner)
    index = start // row
    if start % row or end - start < row:
        stop = min(end, (index + 1) * row)
        for box in boxes(inner, start - index * row, stop - index * row):
            yield Box((index, *box.offsets), (1, *box.sizes), box.start + index * row)
    else:
        rows = (end - start) // row
        stop = start + rows * row
        yield Box((index, *[0] * len(inner)), (rows, *inner), start)
    yield from boxes(shape, stop, end)
