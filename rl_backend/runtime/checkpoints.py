"""Checkpoints of a runtime's models: saved at once or in the background, and loaded into any layout."""

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rl_backend.checkpoint.durable_commit import discard_draft
from rl_backend.checkpoint.hf_writer import critic_config, write_hf_directory
from rl_backend.checkpoint.manifest import TrainingManifest, read_manifest
from rl_backend.checkpoint.state_in_memory import StateInMemory, StateSource
from rl_backend.checkpoint.training_state import (
    RANDOM,
    HostBuffers,
    StateTensors,
    TensorsReader,
    on_every_rank,
    read_training_state,
    require_free,
    require_written,
    reserve_draft,
    write_training_state,
)
from rl_backend.contracts import CheckpointError, ConfigError, ExportInterruptedError, ParallelConfig
from rl_backend.parallel.collectives import gather_objects
from rl_backend.parallel.groups import COLLECTIVE_TIMEOUT
from rl_backend.runtime.handle import GuardedHandle


class CheckpointWriter:
    """Saves the handles of one runtime; in the background one after the other, by one thread.

    Args:
        host_group: every rank over gloo.
        timeout: how long a rank waits for the others in the background.
    """

    def __init__(self, host_group: dist.ProcessGroup, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        self._group, self._timeout = host_group, timeout
        self._background_group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._saves: dict[GuardedHandle, Future[None]] = {}
        self._heard = set[GuardedHandle]()
        """Handles whose failed save this rank has raised already."""
        self._buffers: WeakKeyDictionary[GuardedHandle, HostBuffers] = WeakKeyDictionary()

    def wait(self, handle: GuardedHandle | None = None) -> None:
        """Waits for the saves in the background, or only for that of ``handle``. A collective.

        Raises:
            CheckpointError: a save failed and a rank has not raised that yet; on every rank, so that none continues alone.
        """
        waited = [each for each in self._saves if handle is None or each is handle]
        own = {each: error for each in waited if (error := self._saves[each].exception()) is not None}
        for each in waited:
            del self._saves[each]
        mine = [(_text(error), each in self._heard) for each, error in own.items()]
        self._heard.difference_update(own)
        unheard = {text for failures in gather_objects(mine, self._group) for text, heard in failures if not heard}
        if unheard:
            raise CheckpointError("; ".join(sorted(unheard))) from next(iter(own.values()), None)

    def finish(self, handle: GuardedHandle) -> None:
        """As :meth:`wait`, before ``handle`` goes. A collective only where it has a save that nothing has waited for."""
        if handle in self._saves:
            self.wait(handle)

    def settle(self) -> None:
        """Waits until no save is being written. Raises nothing: each handle's next call has its error."""
        wait(self._saves.values())

    def is_pending(self, handle: GuardedHandle) -> bool:
        """Whether a save of ``handle`` is still being written; raises its error once it is not. Not a collective."""
        save = self._saves.get(handle)
        if save is None or handle in self._heard:
            return False
        # What is done on one rank is committed for all.
        if not save.done():
            return True
        error = save.exception()
        if error is not None:
            # Other ranks may not have asked: the next wait tells them, and there this rank must be with them.
            self._heard.add(handle)
            raise error
        # It stays until the next wait, so that all ranks know of the same saves.
        return False

    def close(self) -> None:
        """Waits for all saves and raises the first error. Not a collective."""
        try:
            waited = {each: save.exception() for each, save in self._saves.items()}
            errors = [error for each, error in waited.items() if error is not None and each not in self._heard]
            self._saves.clear()
            self._heard.clear()
            if errors:
                raise errors[0]
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._background_group is not None:
                dist.destroy_process_group(self._background_group)
            self._thread = self._background_group = None

    def save_training_state(
        self,
        handle: GuardedHandle,
        path: Path,
        state: Callable[[], tuple[StateTensors, TrainingManifest]],
        *,
        asynchronous: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes weights, moments, schedules and random state to ``path``.

        Args:
            state: called when ``path`` is known to be free and no other save of ``handle`` is running.
            extra: rank 0's is kept in the manifest.

        Raises:
            CheckpointError: a rank could not save, or ``extra`` cannot be written as JSON; on every rank.
        """
        self.wait(handle)
        draft = reserve_draft(path, self._group)
        try:
            # By itself: `extra` may be given on one rank alone, and `state` has collectives.
            with on_every_rank(self._group, f"{path} could not be saved"):
                kept = _as_json(extra or {}, path)
            with on_every_rank(self._group, f"{path} could not be saved"):
                tensors, manifest = state()
                manifest = manifest.replace(extra=kept)
                if asynchronous:
                    tensors = self._buffers.setdefault(handle, HostBuffers(handle.groups.device)).copy(tensors)
        except CheckpointError:
            if dist.get_rank(self._group) == 0:
                discard_draft(draft)
            raise
        if not asynchronous:
            write_training_state(draft, path, tensors, manifest, self._group)
            return
        if self._thread is None:
            # Collectives of the thread must not meet those of the caller.
            self._background_group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        assert self._background_group is not None, "made with the thread"
        self._saves[handle] = self._thread.submit(
            write_training_state, draft, path, tensors, manifest, self._background_group
        )

    def save_hf(
        self,
        handle: GuardedHandle,
        path: Path,
        export: Callable[[], Generator[tuple[str, Tensor]]],
        *,
        asynchronous: bool,
        extra: Mapping[str, Any] | None,
    ) -> None:
        """Writes a Hugging Face directory to ``path``; rank 0 writes what all ranks gather, one weight at a time.

        Raises:
            ConfigError: with ``extra``, or asynchronous.
        """
        if extra or asynchronous:
            raise ConfigError(
                f"save_checkpoint(hf=True, extra={extra}, asynchronous={asynchronous}): a Hugging Face directory is written "
                "while weights are gathered, and has no place for extra; use asynchronous=False, and save training state too"
            )
        self.wait(handle)
        writes = dist.get_rank(self._group) == 0
        with on_every_rank(self._group, f"cannot make the directory of {path}"):
            if writes:
                require_free(path)
                path.parent.mkdir(parents=True, exist_ok=True)
        stream = export()
        with on_every_rank(self._group, f"writing {path} failed"), closing(stream):
            try:
                if writes:
                    config = critic_config(handle.hf_config) if handle.head == "values" else None
                    write_hf_directory(path, handle.weights, stream, handle.config.hf_path, config=config, kept=handle.kept)
                else:
                    for _ in stream:
                        pass
            except ExportInterruptedError as error:
                # On the other ranks rank 0 could not write; its reason comes with the agreement.
                if writes:
                    raise CheckpointError(error.message) from error


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _as_json(extra: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(json.dumps(extra))
        problem = "" if kept == extra else f"JSON turns it into {kept}; use strings as keys, and lists"
    except (TypeError, ValueError) as error:
        problem = f"it is kept as JSON: {error}"
    if problem:
        raise CheckpointError.at(path, f"could not be saved: extra={extra!r}: {problem}")
    return dict(kept)


type Differs = Literal["replicas", "tensor_ranks", "expert_ranks", "nowhere"]
"""Between which ranks a stream of random numbers differs: those of one replica, or those at one place, have it in common."""


def training_manifest(handle: GuardedHandle, **progress: Any) -> TrainingManifest:
    """Everything of the training state that is not a tensor.

    Args:
        progress: the steps that the optimizer counts, and ``private`` names, as :class:`TrainingManifest` has them.
    """
    return TrainingManifest(
        model_type=_model_type(handle),
        parameters=handle.saved_shapes,
        kept=dict(handle.kept),
        in_float32=tuple(sorted(handle.in_float32)),
        head=handle.head,
        weight_version=handle.weight_version,
        world_size=dist.get_world_size(),
        runtime_config=handle.config.model_dump(mode="json"),
        **progress,
    )


def load_state[H: GuardedHandle](
    handle: H,
    source: StateSource,
    tensors: Callable[[H], StateTensors],
    *,
    check: Callable[[TrainingManifest], None] = lambda manifest: None,
    differs: Callable[[str], Differs] = lambda name: "replicas",
    earlier: Callable[[str], str] = lambda name: name,
) -> tuple[TrainingManifest, StateTensors]:
    """Fills ``tensors(handle)`` from ``source`` and sets the weight version; the caller restores the rest. A collective.

    Args:
        tensors: called when the checkpoint is known to be complete and of this model.
        check: raises for another reason to refuse it.
        differs: between which ranks a name of random state differs.
        earlier: of a name of random state, the one that older checkpoints have, whatever the device.

    Raises:
        CheckpointError: on every rank.
    """
    group, path = handle.groups.host_group, Path(source)
    with on_every_rank(group, f"{path} cannot be read"):
        manifest = source.manifest if isinstance(source, StateInMemory) else read_manifest(path)
        check(manifest)
        manifest.require_model(_model_type(handle), handle.saved_shapes, handle.head, path)
        manifest.require_readable_by(handle.config.backend, path)
        manifest.require_files(path)
        # Each rank reads its share of the files, so that together they read everything once.
        for name in sorted(manifest.files)[dist.get_rank(group) :: dist.get_world_size(group)]:
            require_written(path, name, manifest.files[name])
        reader = source.reader() if isinstance(source, StateInMemory) else TensorsReader(path, manifest.files)
    saved = reader.metadata.state_dict_metadata
    filled = tensors(handle)
    origins = _origins(handle, manifest, filled, differs)
    for name, origin in origins.items():
        value = filled[name]
        if name.startswith(RANDOM) and origin not in saved and isinstance(value, Tensor):
            older = saved.get(earlier(origin))
            # A state of another size is another device's, and so not there.
            if isinstance(older, TensorStorageMetadata) and older.size == value.shape:
                origins[name] = earlier(origin)
    loaded = {name: value for name, value in filled.items() if origins[name] in saved or not name.startswith(RANDOM)}
    stored = {origins[name]: value for name, value in loaded.items()}
    with on_every_rank(group, f"{path} cannot be compared with the model"):
        for name, value in stored.items():
            held = [value] if isinstance(value, Tensor) else list(value.pieces.values())
            shape = value.shape if isinstance(value, Tensor) else value.whole_size
            reader.require_stored(name, tuple(shape), held[0].dtype if held else None)
    try:
        read_training_state(reader, stored, group)
    except BaseException:
        handle.damaged = f"loading {path} failed in the middle"
        raise
    handle.damaged = handle.broken = ""
    handle.weight_version = manifest.weight_version
    return manifest, loaded


def _origins(
    handle: GuardedHandle, manifest: TrainingManifest, names: Iterable[str], differs: Callable[[str], Differs]
) -> dict[str, str]:
    """Name of this rank's state -> name in the checkpoint."""
    here = RankLayout.of(handle.config.model_dump(mode="json"), dist.get_world_size())
    saved = RankLayout.of(manifest.runtime_config, manifest.world_size)
    origins = {}
    for name in names:
        origins[name] = name
        if name.startswith(RANDOM):
            stream, _, rank = name.rpartition(".")
            source = None if here is None or saved is None else source_rank(int(rank), here, saved, differs(stream))
            origins[name] = f"{stream}.{'none' if source is None else source}"
    return origins


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators, on ``device`` too, under names that no two ranks share."""
    states = {f"{RANDOM}cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{RANDOM}cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(tensors: StateTensors, device: torch.device) -> None:
    for kind, restore in (("cpu", torch.set_rng_state), ("cuda", lambda state: torch.cuda.set_rng_state(state, device))):
        state = tensors.get(f"{RANDOM}{kind}.{dist.get_rank()}")
        if isinstance(state, Tensor):
            restore(state)


def _model_type(handle: GuardedHandle) -> str:
    return str(handle.hf_config.get("model_type"))


@dataclass(frozen=True)
class RankLayout:
    """A runtime's layout over its ranks, which both runtimes number with tp first, then cp, data parallelism and pp."""

    backend: str
    parallel: ParallelConfig
    world_size: int

    @classmethod
    def of(cls, runtime_config: Mapping[str, Any], world_size: int) -> Self | None:
        """Of a dumped ``RuntimeConfig``; None for a runtime whose configuration has no ``parallel`` of ours."""
        try:
            parallel = ParallelConfig.model_validate(runtime_config["backend_cfg"]["parallel"])
            parallel.data_parallel_size(world_size)
            return cls(str(runtime_config["backend"]), parallel, world_size)
        except (ConfigError, KeyError, TypeError, ValidationError):
            return None


def source_rank(rank: int, here: RankLayout, saved: RankLayout, differs: Differs) -> int | None:
    """The rank of ``saved`` whose state of a stream ``rank`` continues, or None where there is no such rank.

    In another layout all ranks of a replica continue the first rank of that replica: those that must draw the same
    numbers do.
    Streams that differ inside a replica continue where the layout still has as many of them.
    """
    if saved == here:
        return rank
    parallel, there = here.parallel, saved.parallel
    match differs:
        case "replicas":
            data_parallel_rank = rank // (parallel.tp * parallel.cp) % parallel.data_parallel_size(here.world_size)
            exists = data_parallel_rank < there.data_parallel_size(saved.world_size)
            return data_parallel_rank * there.tp * there.cp if exists else None
        case "tensor_ranks":
            return rank % parallel.tp if parallel.tp == there.tp else None
        case "expert_ranks":
            same = (parallel.ep, parallel.etp) == (there.ep, there.etp)
            return rank % (parallel.ep * parallel.etp) if same else None
        case "nowhere":
            return 0
