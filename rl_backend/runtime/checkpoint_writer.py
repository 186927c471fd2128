"""Saving the handles of a runtime, now or in the background."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from rl_backend.checkpoint.agreement import raise_on_every_rank
from rl_backend.checkpoint.hf_critic import critic_config
from rl_backend.checkpoint.hf_writer import write_hf_directory
from rl_backend.checkpoint.host_buffers import HostBuffers
from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.training_state import (
    StateTensors,
    discard_directory,
    reserve_directory,
    write_training_state,
)
from rl_backend.contracts import CheckpointError, ConfigError, ExportInterruptedError, ModelHandle, UnsupportedError
from rl_backend.parallel.groups import COLLECTIVE_TIMEOUT


class CheckpointWriter:
    """Saves the handles of one runtime. Saves in the background are written one after the other, by one thread.

    Args:
        host_group: every rank over gloo.
    """

    def __init__(self, host_group: dist.ProcessGroup) -> None:
        self._group = host_group
        self._background_group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._saves: dict[ModelHandle, Future[None]] = {}
        self._buffers: WeakKeyDictionary[ModelHandle, HostBuffers] = WeakKeyDictionary()

    def wait(self, handle: ModelHandle | None = None) -> None:
        """Waits for the saves in the background, or only for that of ``handle``, and raises the first error."""
        waited = [self._saves.pop(each) for each in list(self._saves) if handle is None or each is handle]
        errors = [error for save in waited if (error := save.exception()) is not None]
        if errors:
            raise errors[0]

    def is_pending(self, handle: ModelHandle) -> bool:
        """Whether a save of ``handle`` is still being written; raises its error once it is not. Not a collective.

        When it is done on one rank, it is committed for all.
        """
        save = self._saves.get(handle)
        if save is not None and not save.done():
            return True
        self.wait(handle)
        return False

    def close(self) -> None:
        """Waits for all saves, and gives up what they are written with; raises the first error."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._background_group is not None:
                dist.destroy_process_group(self._background_group)
            self._thread = self._background_group = None

    def save_training_state(
        self,
        handle: ModelHandle,
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
        temporary = reserve_directory(path, self._group)
        problem, cause = None, None
        try:
            kept = _as_json(extra or {})
            tensors, manifest = state()
            manifest = manifest.replace(extra=kept)
            if asynchronous:
                tensors = self._buffers.setdefault(handle, HostBuffers()).copy(tensors)
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            problem, cause = f"{path} could not be saved: {error}", error
        try:
            raise_on_every_rank(problem, self._group, cause)
        except CheckpointError:
            discard_directory(temporary, self._group)
            raise
        if not asynchronous:
            write_training_state(temporary, path, tensors, manifest, self._group)
            return
        if self._thread is None:
            # Collectives of the thread must not meet those of the caller.
            self._background_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        assert self._background_group is not None, "made with the thread"
        self._saves[handle] = self._thread.submit(
            write_training_state, temporary, path, tensors, manifest, self._background_group
        )

    def save_hf(
        self,
        handle: ModelHandle,
        path: Path,
        export: Callable[[], Generator[tuple[str, Tensor]]],
        *,
        source: Path | str,
        hf_config: Mapping[str, Any],
        asynchronous: bool,
        extra: Mapping[str, Any] | None,
    ) -> None:
        """Writes a Hugging Face directory to ``path``; rank 0 writes what all ranks gather.

        Args:
            export: gives every weight on every rank.
            source: the directory whose other files are copied.
            hf_config: its ``config.json``.

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
        raise_on_every_rank(_make_parent(path) if writes else None, self._group)
        stream = export()
        problem: str | None = None
        cause: Exception | None = None
        try:
            if writes:
                config = critic_config(hf_config) if handle.head == "values" else None
                write_hf_directory(path, stream, source, config=config)
            else:
                for _ in stream:
                    pass
        except ExportInterruptedError as error:
            # On the other ranks rank 0 could not write; its reason comes with the agreement below.
            problem, cause = (error.message, error) if writes else (None, None)
        except CheckpointError as error:
            problem, cause = error.message, error
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            problem, cause = f"writing {path} failed: {type(error).__name__}: {error}", error
        finally:
            stream.close()
        raise_on_every_rank(problem, self._group, cause)


def _as_json(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        kept = json.loads(json.dumps(extra))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra={extra!r} is kept as JSON: {error}") from None
    if kept != extra:
        raise CheckpointError(f"extra={extra!r}: JSON turns it into {kept}; use strings as keys, and lists")
    return dict(kept)


def _make_parent(path: Path) -> str | None:
    if path.exists():
        return f"{path} exists; a checkpoint is written to a new directory, choose another path"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot make the directory of {path}: {error}"
    return None
