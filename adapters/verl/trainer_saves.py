"""``async_save`` in verl's trainers: one record of a step for all its saves, none of them unfinished when training ends."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from adapters.verl.late_imports import when_imported, wrap_once
from adapters.verl.registration import is_ours
from rl_backend.checkpoint.durable_commit import rename_synced, write_synced

# Module -> the class that saves and, with its subclasses in main_ppo, ends training.
_TRAINERS = {"verl.trainer.ppo.v1.trainer_base": "PPOTrainer", "verl.trainer.ppo.ray_trainer": "RayPPOTrainer"}


def register() -> None:
    for module, name in _TRAINERS.items():
        when_imported(module, functools.partial(_change, name))


def _change(name: str, module: ModuleType) -> None:
    # The workers, which write the record, do not know which roles are saved after them, nor when the last call is made; Ray
    # ends them even while they write.
    wrap_once(getattr(module, name), "_save_checkpoint", _save)
    wrap_once(getattr(module, name), "fit", _fit)


def _save(original: Callable[..., None], trainer: Any) -> None:
    if not _in_background(trainer.config.actor_rollout_ref.actor):
        original(trainer)
        return
    # As for a role: the step is complete once all roles and the trainer's own files are saved.
    own = Path(os.path.abspath(trainer.config.trainer.default_local_dir), f"global_step_{trainer.global_steps}", "trainer")
    mark(own)
    original(trainer)
    record_step(own, trainer.global_steps)


def _fit(original: Callable[..., Any], trainer: Any, *arguments: Any, **options: Any) -> Any:
    result = original(trainer, *arguments, **options)
    for group in _saving_groups(trainer):
        group.load_checkpoint(None)
    return result


def _saving_groups(trainer: Any) -> Iterator[Any]:
    if _in_background(trainer.config.actor_rollout_ref.actor):
        yield trainer.actor_rollout_wg
    if trainer.use_critic and _in_background(trainer.config.critic):
        yield trainer.critic_wg


def _in_background(role: Any) -> bool:
    return is_ours(role) and bool(role.checkpoint.get("async_save"))


def mark(path: Path) -> None:
    """Delays verl's record of a step until :func:`record_step` of this path, of a role or another name. For one process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _marker(path).touch()


def record_step(path: Path, step: int) -> None:
    """Removes the mark; writes verl's record of the latest step if no mark of that step is left. For one process."""
    _marker(path).unlink(missing_ok=True)
    if any(path.parent.glob(".*.saving")):
        return
    from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename

    record = Path(get_checkpoint_tracker_filename(str(path.parent.parent)))
    new = record.with_name(f".{record.name}.new")
    write_synced(new, str(step))
    rename_synced(new, record)


def trainer_records(path: Path) -> bool:
    """Whether verl's trainer writes the record itself, right after the save: its SFT trainers, which have one role."""
    return path.name.startswith("global_step_")


def _marker(path: Path) -> Path:
    return path.with_name(f".{path.name}.saving")
