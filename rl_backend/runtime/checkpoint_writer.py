"""Saving the handles of a runtime, now or in the background."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
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


@dataclass
class _BackgroundSave:
    handle: ModelHandle
    thread: threading.Thread
    errors: list[BaseException] = field(default_factory=list)


class CheckpointWriter:
    """Saves the handles of one runtime, one save at a time: all of them use the host group.

    Args:
        host_group: every rank over gloo.
    """

    def __init__(self, host_group: dist.ProcessGroup) -> None:
        self._group = host_group
        self._background: _BackgroundSave | None = None
        self._buffers: WeakKeyDictionary[ModelHandle, HostBuffers] = WeakKeyDictionary()

    def wait(self, handle: ModelHandle | None = None) -> None:
        """Waits for the save in the background, or only for one of ``handle``, and raises its error."""
        background = self._background
        if background is None or (handle is not None and background.handle is not handle):
            return
        background.thread.join()
        self._background = None
        if background.errors:
            raise background.errors[0]

    def is_pending(self, handle: ModelHandle) -> bool:
        """Whether a save of ``handle`` is still being written; raises its error once it is not. Not a collective.

        When it is done on one rank, it is committed for all.
        """
        background = self._background
        if background is None or background.handle is not handle:
            return False
        if background.thread.is_alive():
            return True
        self.wait(handle)
        return False

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
            state: called when ``path`` is known to be free and no other save is running.
            extra: rank 0's is kept in the manifest.

        Raises:
            ConfigError: ``extra`` cannot be written as JSON.
        """
        kept = _as_json(extra or {})
        self.wait()
        group = self._group
        temporary = reserve_directory(path, group)
        try:
            tensors, manifest = state()
            manifest = manifest.replace(extra=kept)
            copies = self._buffers.setdefault(handle, HostBuffers()).copy(tensors) if asynchronous else tensors
        except BaseException:
            discard_directory(temporary, group)
            raise
        if not asynchronous:
            write_training_state(temporary, path, tensors, manifest, group)
            return
        errors: list[BaseException] = []

        def write() -> None:
            try:
                write_training_state(temporary, path, copies, manifest, group)
            except BaseException as error:  # noqa: BLE001 - raised by wait() in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=write, name=f"checkpoint-{handle.name}", daemon=False)
        self._background = _BackgroundSave(handle, thread, errors)
        thread.start()

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
        self.wait()
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
        raise ConfigError.of("save_checkpoint(extra)", extra, f"it is kept as JSON: {error}") from None
    if kept != extra:
        raise ConfigError.of("save_checkpoint(extra)", extra, f"JSON turns it into {kept}; use strings as keys, and lists")
    return dict(kept)


def _make_parent(path: Path) -> str | None:
    if path.exists():
        return f"{path} exists; a checkpoint is written to a new directory, choose another path"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot make the directory of {path}: {error}"
    return None
