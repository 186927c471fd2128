"""verl's ``async_save``: a training state that is written while training continues, and verl's record of the latest one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

from rl_backend.checkpoint.durable_commit import rename_synced, write_synced
from rl_backend.checkpoint.training_state import on_every_rank, raise_on_every_rank
from rl_backend.contracts import CheckpointError, ModelHandle
from rl_backend.parallel.groups import world_group
from rl_backend.runtime import Runtime


@dataclass
class PendingSave:
    """A save in the background, until every rank knows that it is committed.

    Attributes:
        path: verl's directory of the role.
        step: verl's ``global_step``.
        keep: verl's ``max_ckpt_to_keep``.
        replaces: gives the files their name, where an earlier save of this name is in their place.
        problem: what this rank has heard of.
    """

    path: Path
    step: int
    keep: int | None
    replaces: AbstractContextManager[Path] | None
    problem: str | None = None

    def is_done(self, runtime: Runtime[Any], handle: ModelHandle) -> bool:
        """Whether it is on every rank. A collective over all ranks; raises nothing."""
        try:
            done = not runtime.checkpoint_is_pending(handle)
        except Exception as error:  # noqa: BLE001 - raised by ``commit``, on every rank
            self.problem, done = _text(error), True
        everywhere = [False] * dist.get_world_size()
        dist.all_gather_object(everywhere, done)
        return all(everywhere)

    def commit(self, runtime: Runtime[Any], handle: ModelHandle) -> None:
        """Waits for the files and gives them their name. A collective over all ranks.

        Raises:
            CheckpointError: they could not be written; on every rank.
        """
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
    """Marks the role of ``path`` as not yet saved. A collective over all ranks.

    Raises:
        CheckpointError: the file system refuses; on every rank.
    """
    with on_every_rank(world_group(), f"{path} could not be saved"):
        if dist.get_rank() == 0:
            mark(path)


def mark(path: Path) -> None:
    """Keeps verl's record of a step back until :func:`record_step` of this path. For one process.

    Args:
        path: of a role, or of another name beside the roles.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _marker(path).touch()


def record_step(path: Path, step: int) -> None:
    """Takes the mark away; writes verl's record of the latest step once nothing of it has one. For one process."""
    _marker(path).unlink(missing_ok=True)
    if any(path.parent.glob(".*.saving")):
        return
    record = Path(get_checkpoint_tracker_filename(str(path.parent.parent)))
    new = record.with_name(f".{record.name}.new")
    write_synced(new, str(step))
    rename_synced(new, record)


def trainer_records(path: Path) -> bool:
    """Whether verl's trainer writes the record itself, right after the save: its SFT trainers, which have one role."""
    return path.name.startswith("global_step_")


def _marker(path: Path) -> Path:
    return path.with_name(f".{path.name}.saving")


def _text(error: Exception) -> str:
    return error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
