"""What ``async_save`` asks of verl's trainer: one record for all of a step.

The workers then write verl's record of the latest step (:mod:`adapters.verl.background_saves`). They do not know which other
roles the trainer saves after them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from adapters.verl.late_imports import when_imported
from adapters.verl.run_config import is_ours

_TRAINERS = {"verl.trainer.ppo.v1.trainer_base": "PPOTrainer", "verl.trainer.ppo.ray_trainer": "RayPPOTrainer"}
"""Module -> the class that saves."""

_DONE = "_rl_backend_records"


def register() -> None:
    """Changes verl's trainers, in the process that imports them."""
    for module, name in _TRAINERS.items():
        when_imported(module, functools.partial(_change, name))


def _change(name: str, module: ModuleType) -> None:
    trainer = getattr(module, name)
    save = trainer._save_checkpoint
    if hasattr(save, _DONE):
        return

    @functools.wraps(save)
    def _save_checkpoint(self: Any) -> None:
        if not _in_background(self.config.actor_rollout_ref.actor):
            save(self)
            return
        from adapters.verl.background_saves import mark, record_step

        # A name beside those of the roles: the step is complete once all of them and the trainer's own files are.
        own = Path(os.path.abspath(self.config.trainer.default_local_dir), f"global_step_{self.global_steps}", "trainer")
        mark(own)
        save(self)
        record_step(own, self.global_steps)

    setattr(_save_checkpoint, _DONE, True)
    trainer._save_checkpoint = _save_checkpoint


def _in_background(role: Any) -> bool:
    return is_ours(role) and bool(role.checkpoint.get("async_save"))
