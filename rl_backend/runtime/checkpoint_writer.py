"""Saving the handles of a runtime, now or in the background."""

import json
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from rl_backend.checkpoint import training_state
from rl_backend.checkpoint.durable_commit import discard_draft
from rl_backend.checkpoint.hf_writer import critic_config, write_hf_directory
from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.contracts import CheckpointError, ConfigError, ExportInterruptedError, UnsupportedError
from rl_backend.parallel.groups import COLLECTIVE_TIMEOUT
from rl_backend.runtime.engine import GuardedHandle


class CheckpointWriter:
    """Saves the handles of one runtime. Saves in the background are written one after the other, by one thread.

    Args:
        host_group: every rank over gloo.
    """

    def __init__(self, host_group: dist.ProcessGroup) -> None:
        self._group = host_group
        self._background_group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._saves: dict[GuardedHandle, Future[None]] = {}
        self._heard = set[GuardedHandle]()
        """Whose save has failed, and this rank has raised its error."""
        self._buffers: WeakKeyDictionary[GuardedHandle, training_state.HostBuffers] = WeakKeyDictionary()

    def wait(self, handle: GuardedHandle | None = None) -> None:
        """Waits for the saves in the background, or only for that of ``handle``. A collective.

        Raises:
            CheckpointError: a save failed and a rank has not heard of it yet; on every rank, so that none continues alone.
        """
        waited = [each for each in self._saves if handle is None or each is handle]
        own = {each: error for each in waited if (error := self._saves[each].exception()) is not None}
        for each in waited:
            del self._saves[each]
        everywhere: list[list[tuple[str, bool]]] = [[]] * dist.get_world_size(self._group)
        mine = [(_text(error), each in self._heard) for each, error in own.items()]
        self._heard.difference_update(own)
        dist.all_gather_object(everywhere, mine, group=self._group)
        unheard = {text for failures in everywhere for text, heard in failures if not heard}
        if unheard:
            raise CheckpointError("; ".join(sorted(unheard))) from next(iter(own.values()), None)

    def settle(self) -> None:
        """Waits until no save is being written. Raises nothing: each handle's next call has its error."""
        wait(self._saves.values())

    def is_pending(self, handle: GuardedHandle) -> bool:
        """Whether a save of ``handle`` is still being written; raises its error once it is not. Not a collective.

        When it is done on one rank, it is committed for all.
        """
        save = self._saves.get(handle)
        if save is None or handle in self._heard:
            return False
        if not save.done():
            return True
        error = save.exception()
        if error is not None:
            # Other ranks may not have asked: the next wait tells them, and there this rank must be with them.
            self._heard.add(handle)
            raise error
        del self._saves[handle]
        return False

    def close(self) -> None:
        """Waits for all saves, and gives up what they are written with; raises the first error. Not a collective."""
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
        state: Callable[[], tuple[training_state.StateTensors, TrainingManifest]],
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
        draft = training_state.reserve_draft(path, self._group)
        try:
            # By itself: `extra` may be given on one rank alone, and `state` has collectives.
            with training_state.on_every_rank(self._group, f"{path} could not be saved"):
                kept = _as_json(extra or {}, path)
            with training_state.on_every_rank(self._group, f"{path} could not be saved"):
                tensors, manifest = state()
                manifest = manifest.replace(extra=kept)
                if asynchronous:
                    tensors = self._buffers.setdefault(handle, training_state.HostBuffers()).copy(tensors)
        except CheckpointError:
            if dist.get_rank(self._group) == 0:
                discard_draft(draft)
            raise
        if not asynchronous:
            training_state.write_training_state(draft, path, tensors, manifest, self._group)
            return
        if self._thread is None:
            # Collectives of the thread must not meet those of the caller.
            self._background_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        assert self._background_group is not None, "made with the thread"
        self._saves[handle] = self._thread.submit(
            training_state.write_training_state, draft, path, tensors, manifest, self._background_group
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
        """Writes a Hugging Face directory to ``path``; rank 0 writes what all ranks gather.

        Args:
            export: gives every weight on every rank, one at a time: a rank holds one beside its own part of the model.

        Raises:
            ConfigError: with ``extra``.
            UnsupportedError: asynchronous.
        """
        if extra:
            raise ConfigError.of(
                "save_checkpoint(extra)", extra, "a Hugging Face directory has no place for it; save training state as well"
            )
        if asynchronous:
            raise UnsupportedError(
                "save_checkpoint(hf=True, asynchronous=True): a Hugging Face directory is written while the weights are "
                "gathered, so it cannot be left to the background; use asynchronous=False"
            )
        self.wait(handle)
        writes = dist.get_rank(self._group) == 0
        with training_state.on_every_rank(self._group, f"cannot make the directory of {path}"):
            if writes:
                training_state.require_free(path)
                path.parent.mkdir(parents=True, exist_ok=True)
        stream = export()
        with training_state.on_every_rank(self._group, f"writing {path} failed"), closing(stream):
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
    except (TypeError, ValueError) as error:
        raise CheckpointError.at(path, f"could not be saved: extra={extra!r} is kept as JSON: {error}") from None
    if kept != extra:
        raise CheckpointError.at(
            path, f"could not be saved: extra={extra!r}: JSON turns it into {kept}; use strings as keys, and lists"
        )
    return dict(kept)
