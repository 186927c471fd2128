"""Training state as ``torch.distributed.checkpoint`` directories that any number of ranks can load."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rl_backend.checkpoint.durable_commit import commit_draft, discard_draft, draft_of, sync, with_notes, write_synced
from rl_backend.checkpoint.manifest import MANIFEST_NAME, FileFacts, TrainingManifest
from rl_backend.checkpoint.state_files import DigestingWriter, TensorsReader
from rl_backend.contracts import CheckpointError, RLBackendError


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
        """The piece at ``index.offset``."""
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
    """Looks pieces up by their offsets."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.piece(index) if isinstance(found, TensorPieces) else super().lookup_object(index)


class PiecesLoadPlanner(DefaultLoadPlanner):
    """Looks pieces up by their offsets."""

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
    """Host memory for one model's state; pinned for tensors on a GPU, which copies at the speed of the bus.

    It stays allocated from one copy to the next: writing to fresh memory takes several times as long.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copy(self, tensors: StateTensors) -> dict[str, Tensor | TensorPieces]:
        """Copies, valid until the next call. Pieces that another rank writes are left out."""
        devices = set[torch.device]()
        copies: dict[str, Tensor | TensorPieces] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorPieces):
                pieces = {
                    offsets: self._copied((name, offsets), piece, devices)
                    for offsets, piece in tensor.pieces.items()
                    if tensor.writes
                }
                copies[name] = TensorPieces(tensor.whole_size, pieces, writes=tensor.writes)
            else:
                copies[name] = self._copied((name, ()), tensor.detach(), devices)
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return copies

    def _copied(self, key: tuple[str, tuple[int, ...]], tensor: Tensor, devices: set[torch.device]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        if tensor.device.type != "cpu":
            devices.add(tensor.device)
        return buffer.copy_(tensor, non_blocking=True)


def raise_on_every_rank(
    problem: str | None,
    group: dist.ProcessGroup,
    cause: BaseException | None = None,
    kind: type[RLBackendError] = CheckpointError,
) -> None:
    """A collective over ``group`` (gloo): raises on every rank if any rank has a problem.

    Args:
        cause: what the error on this rank is raised from.
        kind: of the error.
    """
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    found = {rank: text for rank, text in enumerate(problems) if text is not None}
    if found:
        distinct = dict.fromkeys(found.values())
        where = "" if len(found) == len(problems) else f" (on rank {', '.join(map(str, found))})"
        raise kind("; ".join(distinct) + where, ranks=sorted(found)) from cause


@contextmanager
def on_every_rank(group: dist.ProcessGroup, failed: str, kind: type[RLBackendError] = CheckpointError) -> Iterator[None]:
    """Ends its body with a collective over ``group`` (gloo): what fails on one rank is an error on every rank.

    Args:
        failed: begins the message, unless the body raises one of ``kind`` with its own.
        kind: of the error.
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
    """Raises :class:`CheckpointError` where ``path`` exists."""
    if path.exists():
        raise CheckpointError.at(path, "exists; a checkpoint is written to a new directory, choose another path")


def reserve_draft(path: Path, group: dist.ProcessGroup) -> Path:
    """Checks that ``path`` is free and makes a draft of it. A collective over ``group``.

    Raises:
        CheckpointError: ``path`` exists, or the directory cannot be made; on every rank.
    """
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

    Args:
        draft: from :func:`reserve_draft`.
        tensors: those of one name must be equal on all ranks, or pieces of one tensor.

    Raises:
        CheckpointError: a rank could not write; on every rank, and ``path`` does not exist.
    """
    first = dist.get_rank(group) == 0
    writer = DigestingWriter(draft)
    try:
        try:
            save(dict(tensors), storage_writer=writer, planner=PiecesSavePlanner(), process_group=group)
        except CheckpointException as error:
            raise_interrupt(error, dist.get_rank(group))
            raise CheckpointError.at(path, f"could not be written: {_causes(error)}") from error
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
    """Fills ``tensors`` in place from a checkpoint whose files are those that were written. A collective.

    Raises:
        CheckpointError: a rank could not read; on every rank, and ``tensors`` are partly filled.
    """
    try:
        load(dict(tensors), storage_reader=reader, planner=PiecesLoadPlanner(), process_group=group)
    except CheckpointException as error:
        raise_interrupt(error, dist.get_rank(group))
        raise CheckpointError.at(reader.path, f"could not be read: {_causes(error)}") from error


def raise_interrupt(error: CheckpointException, rank: int) -> None:
    """torch counts an interrupt of this process, in the middle of a read or a write, among the failures."""
    own = error.failures.get(rank)
    if own is not None and not isinstance(own[0], Exception):
        raise own[0] from None


def _causes(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items())
