"""Checkpoints of an engine in the directories that verl names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from adapters.verl.options.settings import STATE
from adapters.verl.trainers import mark, record_step, trainer_records
from rl_backend.checkpoint.durable_commit import rename_synced, sync_tree
from rl_backend.checkpoint.peft_files import CONFIG_FILE, write_peft_directory
from rl_backend.checkpoint.training_state import on_every_rank, raise_on_every_rank
from rl_backend.contracts import CheckpointError, ModelHandle, UnsupportedError
from rl_backend.parallel.collectives import gather_objects
from rl_backend.parallel.groups import world_group
from rl_backend.runtime import Runtime

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yields a path to write flushed files to, which then replaces ``path``. A collective over all ranks.

    Raises:
        CheckpointError: the file system refuses; on every rank, and the earlier directory has its name.
    """
    finish_replacing(path)
    new, old = _new(path), _old(path)
    with on_every_rank(world_group(), f"{path} cannot be replaced"):
        if dist.get_rank() == 0:
            for left_behind in (new, old):
                shutil.rmtree(left_behind, ignore_errors=True)
    yield new
    with on_every_rank(world_group(), f"{new} could not take the place of {path}"):
        if dist.get_rank() == 0:
            _take_place(path)


def found_name(path: Path) -> Path:
    """The current name of the directory ``path``, which a kill may have left under another one. Changes nothing."""
    if path.exists() or not _old(path).exists():
        return path
    return _new(path) if _new(path).exists() else _old(path)


def exists_on_rank_0(path: Path) -> bool:
    """Rank 0's answer, on every rank. A collective over all ranks."""
    found = [path.exists()]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def finish_replacing(path: Path) -> None:
    """Gives a directory its name that a kill has left without it; a collective over all ranks, which fail together."""
    with on_every_rank(world_group(), f"{path} could not be given its name; rename the one that a kill left next to it"):
        if dist.get_rank() == 0:
            found = found_name(path)
            if found != path:
                rename_synced(found, path)


def _take_place(path: Path) -> None:
    new, old = _new(path), _old(path)
    # A kill between the two renames leaves both under names that found_name knows.
    if path.exists():
        path.rename(old)
    try:
        rename_synced(new, path)
    except OSError:
        if old.exists() and not path.exists():
            with suppress(OSError):
                old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


_STATE_DIRECTORY, _HF_DIRECTORY, _ADAPTER_DIRECTORY = "training_state", "huggingface", "lora_adapter"


class EngineCheckpoints:
    """Saves and loads one model: in verl's directory ``training_state/`` is the runtime's checkpoint, ``huggingface/`` one
    for transformers and vLLM, and ``lora_adapter/`` one for peft. verl's own code decides which old checkpoints go.

    Args:
        save_contents, load_contents: ``model`` alone or all of ``STATE``, and ``hf_model``. As in verl, ``model`` is a
            Hugging Face directory; with LoRA it is the adapter in peft's format.
        tokenizer: :func:`own_tokenizer`; its files replace those of the model's directory.
        sharded: verl's ``use_dist_checkpointing``: ``model`` is in the training state alone.
        asynchronous: verl's ``async_save``: the training state is written in the background, the Hugging Face directory, for
            which all ranks gather weights, before ``save`` returns. As in verl's engine, rank 0 then writes verl's record of
            the latest step, and old checkpoints go, once the files are committed on every rank: at the next call.
        last_step: nothing is left in the background after it, because verl may then end the processes.
        lora: the model has a tenant.

    """

    def __init__(
        self,
        save_contents: frozenset[str],
        load_contents: frozenset[str],
        tokenizer: Any = None,
        *,
        sharded: bool = False,
        asynchronous: bool = False,
        last_step: int = 0,
        lora: bool = False,
    ) -> None:
        self._saves_adapter = lora and "model" in save_contents
        self._saves_hf = "hf_model" in save_contents or ("model" in save_contents and not sharded and not lora)
        self._saves_state = save_contents >= STATE
        self._loads_state = load_contents >= STATE
        self._loads_weights = bool(load_contents) and not self._loads_state
        self._weights_directory, self._weights_file = (
            (_ADAPTER_DIRECTORY, CONFIG_FILE) if lora else (_HF_DIRECTORY, "config.json")
        )
        self._tokenizer = tokenizer
        self._asynchronous = asynchronous
        self._last_step = last_step
        self._pending: PendingSave | None = None

    @cached_property
    def _kept(self) -> BaseCheckpointManager:
        return BaseCheckpointManager(model=None, optimizer=None)

    def save(
        self,
        runtime: Runtime[Any],
        handle: ModelHandle,
        local_path: str,
        hdfs_path: str | None,
        max_ckpt_to_keep: int | None,
        *,
        step: int = 0,
    ) -> None:
        """Writes ``local_path``. Files of an earlier save stay until the new one is complete.

        Raises:
            CheckpointError: a rank could not write this save or the one before; on every rank.
            UnsupportedError: a path on HDFS.
        """
        self.finish(runtime, handle)
        path = _local(local_path, hdfs_path)
        first = dist.get_rank() == 0
        records = self._asynchronous and not trainer_records(path)
        background = records and self._saves_state and not 0 < self._last_step <= step
        if first:
            # A directory that is written again must not be deleted as the oldest checkpoint.
            self._kept.previous_saved_paths = [kept for kept in self._kept.previous_saved_paths if kept != str(path)]
            self._kept.ensure_checkpoint_capacity(None if background else max_ckpt_to_keep)
        if records:
            begin_role(path)
        if self._saves_hf:
            with replacing(path / _HF_DIRECTORY) as new:
                runtime.save_checkpoint(handle, new, hf=True)
                if self._tokenizer is not None:
                    with on_every_rank(world_group(), f"the tokenizer could not be written to {new}"):
                        if first:
                            self._tokenizer.save_pretrained(new)
                            sync_tree(new)
        if self._saves_adapter:
            with replacing(path / _ADAPTER_DIRECTORY) as new:
                factors = runtime.export_lora_adapter(handle)
                with on_every_rank(world_group(), f"the adapter could not be written to {new}"):
                    if first:
                        tenants = {each.name: each for each in runtime.list_lora_adapters(handle.base)}
                        write_peft_directory(new, factors, tenants[handle.name].config, runtime.config.hf_path)
        if background:
            self._begin(runtime, handle, PendingSave(path, step, max_ckpt_to_keep, None))
            return
        if self._saves_state:
            with replacing(path / _STATE_DIRECTORY) as new:
                runtime.save_checkpoint(handle, new)
        self._committed(path, step, max_ckpt_to_keep, records=records)

    def _begin(self, runtime: Runtime[Any], handle: ModelHandle, save: PendingSave) -> None:
        directory = save.path / _STATE_DIRECTORY
        finish_replacing(directory)
        if exists_on_rank_0(directory):
            save.replaces = replacing(directory)
            directory = save.replaces.__enter__()
        runtime.save_checkpoint(handle, directory, asynchronous=True)
        self._pending = save

    def poll(self, runtime: Runtime[Any], handle: ModelHandle) -> None:
        """:meth:`finish` where a save in the background is written. A collective over all ranks."""
        if self._pending is not None and self._pending.is_done(runtime, handle):
            self.finish(runtime, handle)

    def finish(self, runtime: Runtime[Any], handle: ModelHandle) -> None:
        """Waits for a save in the background, records it and lets old ones go. A collective over all ranks.

        Raises:
            CheckpointError: it failed; on every rank. verl's record and the old checkpoints are as they were.
        """
        save, self._pending = self._pending, None
        if save is not None:
            save.commit(runtime, handle)
            self._committed(save.path, save.step, save.keep, records=True)

    def _committed(self, path: Path, step: int, keep: int | None, *, records: bool) -> None:
        with on_every_rank(world_group(), f"verl's record of step {step} could not be written"):
            if dist.get_rank() == 0:
                if records:
                    record_step(path, step)
                self._kept.register_checkpoint(str(path), keep)

    def weights_directory(self, local_path: str, hdfs_path: str | None = None) -> Path | None:
        """The directory that weights, or an adapter, are loaded from alone, or None where the training state is."""
        if not self._loads_weights:
            return None
        path = found_name(_local(local_path, hdfs_path) / self._weights_directory)
        if not (path / self._weights_file).is_file():
            raise CheckpointError.at(
                path,
                f"has no {self._weights_file}; load_contents without optimizer and extra reads what save_contents with "
                "'model', or without LoRA 'hf_model', wrote",
            )
        return path

    def load(self, runtime: Runtime[Any], handle: ModelHandle, local_path: str, hdfs_path: str | None = None) -> None:
        self.finish(runtime, handle)
        path = _local(local_path, hdfs_path)
        if self._loads_state:
            finish_replacing(path / _STATE_DIRECTORY)
            runtime.load_checkpoint(handle, path / _STATE_DIRECTORY)


@dataclass
class PendingSave:
    """A save in the background that is not yet committed on every rank.

    Attributes:
        replaces: gives the files their name, where an earlier save of this name is in their place.
        problem: the error of this rank's writer.
    """

    path: Path
    step: int
    keep: int | None
    replaces: AbstractContextManager[Path] | None
    problem: str | None = None

    def is_done(self, runtime: Runtime[Any], handle: ModelHandle) -> bool:
        try:
            done = not runtime.checkpoint_is_pending(handle)
        except Exception as error:  # noqa: BLE001 - raised by ``commit``, on every rank
            self.problem, done = _text(error), True
        return all(gather_objects(done, world_group()))

    def commit(self, runtime: Runtime[Any], handle: ModelHandle) -> None:
        """Waits for the files and gives them their name; a collective over all ranks, which fail together."""
        cause: Exception | None = None
        try:
            runtime.wait_for_checkpoint(handle)
        except CheckpointError as error:
            self.problem, cause = self.problem or _text(error), error
        problem = self.problem and f"async_save of step {self.step} to {self.path} failed in the background: {self.problem}"
        raise_on_every_rank(problem, world_group(), cause)
        if self.replaces is not None:
            self.replaces.__exit__(None, None, None)


def begin_role(path: Path) -> None:
    """Marks the role of ``path`` as not yet saved; a collective over all ranks, which fail together."""
    with on_every_rank(world_group(), f"{path} could not be saved"):
        if dist.get_rank() == 0:
            mark(path)


def own_tokenizer(model_config: HFModelConfig) -> Any:
    """The tokenizer or processor that verl has loaded, where it is not the one of the model's directory; else None."""
    if model_config.custom_chat_template is None and model_config.tokenizer_path in (None, model_config.path):
        return None
    return model_config.tokenizer if model_config.processor is None else model_config.processor


def _local(local_path: str, hdfs_path: str | None) -> Path:
    if hdfs_path is not None or "://" in str(local_path):
        raise UnsupportedError(
            f"local_path={local_path!r}, hdfs_path={hdfs_path!r}: checkpoints are files of a mounted path; set "
            "trainer.default_hdfs_dir=null"
        )
    return Path(os.path.abspath(local_path))


def _text(error: Exception) -> str:
    return error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
