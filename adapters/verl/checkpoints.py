"""Checkpoints of an engine in the directories that verl names."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from rl_backend.contracts import CheckpointError, ConfigError, ModelHandle, UnsupportedError
from rl_backend.runtime import Runtime

STATE = frozenset({"model", "optimizer", "extra"})
"""verl's names for weights, optimizer with schedules, and random state; one directory here, restored together."""

_STATE_DIRECTORY, _HF_DIRECTORY = "training_state", "huggingface"


class EngineCheckpoints:
    """Saves and loads one model; verl's own code decides which old checkpoints go.

    Below verl's directory ``training_state/`` is the runtime's checkpoint, ``huggingface/`` one for transformers and vLLM.

    Args:
        save_contents, load_contents: all of ``STATE`` or none of it, and ``hf_model``.

    Raises:
        ConfigError: other contents.
    """

    def __init__(self, save_contents: frozenset[str], load_contents: frozenset[str]) -> None:
        _require_contents("save_contents", save_contents)
        _require_contents("load_contents", load_contents)
        self._save, self._load = save_contents, load_contents

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
    ) -> None:
        """Writes ``local_path``. What it has of an earlier save is there until the new one is complete.

        Raises:
            CheckpointError: a rank could not write; on every rank.
            UnsupportedError: a path on HDFS.
        """
        path = _local(local_path, hdfs_path)
        first = dist.get_rank() == 0
        if first:
            # What is written anew must not count as the old checkpoint that has to go.
            self._kept.previous_saved_paths = [kept for kept in self._kept.previous_saved_paths if kept != str(path)]
            self._kept.ensure_checkpoint_capacity(max_ckpt_to_keep)
        if "hf_model" in self._save:
            with _replaced(path / _HF_DIRECTORY):
                runtime.save_checkpoint(handle, path / _HF_DIRECTORY, hf=True)
        if self._save & STATE:
            with _replaced(path / _STATE_DIRECTORY):
                runtime.save_checkpoint(handle, path / _STATE_DIRECTORY)
        if first:
            self._kept.register_checkpoint(str(path), max_ckpt_to_keep)
        dist.barrier()

    def hf_directory(self, local_path: str, hdfs_path: str | None = None) -> Path | None:
        """The directory that weights alone are loaded from, or None where the training state is.

        Raises:
            CheckpointError: it does not exist.
        """
        path = _local(local_path, hdfs_path) / _HF_DIRECTORY
        if self._load & STATE or "hf_model" not in self._load:
            return None
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path} is no Hugging Face directory; load_contents=['hf_model'] reads what save_contents with 'hf_model' "
                "wrote",
                path=str(path),
            )
        return path

    def load(self, runtime: Runtime[Any], handle: ModelHandle, local_path: str, hdfs_path: str | None = None) -> None:
        """Restores the training state.

        Raises:
            CheckpointError: see :meth:`~rl_backend.runtime.Runtime.load_checkpoint`.
            UnsupportedError: a path on HDFS.
        """
        if self._load & STATE:
            runtime.load_checkpoint(handle, _local(local_path, hdfs_path) / _STATE_DIRECTORY)


@contextmanager
def _replaced(path: Path) -> Generator[None]:
    """Around writing a new ``path``: the old one is moved aside, and back when that fails. A collective over all ranks."""
    first = dist.get_rank() == 0
    aside = path.with_name(f".{path.name}.replaced-{uuid.uuid4().hex[:8]}")
    moved = first and path.exists()
    if moved:
        path.rename(aside)
    dist.barrier()
    try:
        yield
    except BaseException:
        if moved:
            aside.rename(path)
        raise
    if moved:
        shutil.rmtree(aside)


def _local(local_path: str, hdfs_path: str | None) -> Path:
    for name, value in (("local_path", local_path), ("hdfs_path", hdfs_path)):
        if value is not None and "://" in str(value):
            raise UnsupportedError(
                f"{name}={value!r}: checkpoints are written to and read from file systems; set "
                "trainer.default_hdfs_dir=null and use a mounted path",
                path=str(value),
            )
    if hdfs_path is not None:
        raise UnsupportedError(f"hdfs_path={hdfs_path!r}: set trainer.default_hdfs_dir=null", path=str(hdfs_path))
    return Path(os.path.abspath(local_path))


def _require_contents(field: str, contents: frozenset[str]) -> None:
    state = contents & STATE
    if contents - STATE - {"hf_model"}:
        raise ConfigError.of(f"checkpoint.{field}", sorted(contents), f"expected {sorted(STATE)} and 'hf_model'")
    if state and state != STATE:
        raise ConfigError.of(
            f"checkpoint.{field}",
            sorted(contents),
            f"{sorted(STATE)} are one training state, saved and restored together; name all three, or 'hf_model' alone for "
            "weights",
        )
