"""verl's trainers with ``async_save``: when a step is recorded, and what is left when training ends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import adapters.verl.plugin  # noqa: F401 - what verl's entry point imports
from adapters.verl.trainers import _TRAINERS, _change, mark, record_step
from tests.support.verl_configs import TARGET

RECORD = "latest_checkpointed_iteration.txt"
TRAINERS = [f"{module}.{name}" for module, name in _TRAINERS.items()]


class Role:
    """A worker group. Its saves are written at once, or in the background until it is told to finish."""

    def __init__(self, background: bool, on_save: Callable[[], None]) -> None:
        self.background, self.on_save, self.pending = background, on_save, list[tuple[Path, int]]()

    def save_checkpoint(self, path: str, hdfs_path: str | None, step: int, max_ckpt_to_keep: int | None) -> None:
        self.on_save()
        mark(Path(path))
        self.pending.append((Path(path), step))
        if not self.background:
            self.load_checkpoint(None)

    def load_checkpoint(self, local_path: None) -> None:
        for path, step in self.pending:
            record_step(path, step)
        self.pending.clear()


class Run:
    """One of verl's trainers before its last step, with roles that are saved in the background or not.

    Attributes:
        recorded: verl's record as each role begins to save.
    """

    def __init__(self, trainer: str, folder: Path, target: str = TARGET, **background: bool) -> None:
        module, _, name = trainer.rpartition(".")
        self.folder, self.recorded = folder, list[str | None]()
        config = run_configuration(target, default_local_dir=folder, **background)
        groups = {name: Role(value, lambda: self.recorded.append(self.record)) for name, value in background.items()}
        self.groups, self.verls = groups, getattr(importlib.import_module(module), name)
        self.trainer = SimpleNamespace(
            config=config,
            global_steps=4,
            use_critic="critic" in groups,
            actor_rollout_wg=groups["actor"],
            critic_wg=groups.get("critic"),
            train_dataloader=SimpleNamespace(state_dict=dict),
            trainer_mode="sync",
            checkpoint_callback=SimpleNamespace(on_save=lambda **_: None),
        )

    def save(self) -> None:
        """verl's own method."""
        self.verls._save_checkpoint(self.trainer)

    @property
    def record(self) -> str | None:
        path = self.folder / RECORD
        return path.read_text() if path.exists() else None


def run_configuration(target: str, *, default_local_dir: Path, **background: bool) -> Any:
    hydra = pytest.importorskip("hydra")
    overrides = [f"trainer.default_local_dir={default_local_dir}"]
    roles = {"actor": "actor_rollout_ref.actor", "critic": "critic"}
    overrides += [f"{roles[name]}.megatron._target_={target}" for name in roles]
    overrides += [f"{roles[name]}.checkpoint.async_save=True" for name in background]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=["model_engine=megatron", *overrides])


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("background", [False, True])
def test_a_step_is_recorded_once_every_role_and_the_trainers_files_are_saved(
    trainer: str, background: bool, tmp_path: Path
) -> None:
    run = Run(trainer, tmp_path, actor=False, critic=background)
    run.save()
    assert run.recorded == [None, None]
    assert (tmp_path / "global_step_4" / "data.pt").is_file()
    assert run.record == (None if background else "4")
    run.groups["critic"].load_checkpoint(None)
    assert run.record == "4"
    assert not list((tmp_path / "global_step_4").glob(".*"))


def test_a_save_that_fails_leaves_the_record(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no space left")

    run = Run(TRAINERS[0], tmp_path, actor=False, critic=False)
    run.groups["critic"].on_save = fail
    with pytest.raises(OSError, match="no space left"):
        run.save()
    assert run.record is None


@pytest.mark.shows("verl: with async_save, no save is left in the background when training ends")
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("roles", [{"actor": True}, {"actor": True, "critic": True}])
def test_what_is_in_the_background_when_training_ends_is_finished(
    trainer: str, roles: dict[str, bool], tmp_path: Path
) -> None:
    class Trainer:
        """Ends after a save of its last step."""

        def __init__(self, run: Run) -> None:
            vars(self).update(vars(run.trainer))
            self.save = run.save

        def fit(self, agents: str) -> str:
            self.save()
            return agents

        def _save_checkpoint(self) -> None:
            raise NotImplementedError

    module = ModuleType("trainers")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    _change("Trainer", module)
    run = Run(trainer, tmp_path, **roles)
    assert Trainer(run).fit("agents") == "agents"
    assert run.record == "4"


def test_verls_own_engine_is_left_alone(tmp_path: Path) -> None:
    run = Run(TRAINERS[0], tmp_path, "verl.workers.config.McoreEngineConfig", actor=False, critic=False)
    run.save()
    assert run.recorded == [None, "4"]


def test_every_trainer_of_main_ppo_has_the_changed_methods() -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

    assert {"sync", "colocate_async", "separate_async"} <= TRAINER_REGISTRY.keys()
    for trainer in (*TRAINER_REGISTRY.values(), RayPPOTrainer):
        base = PPOTrainer if issubclass(trainer, PPOTrainer) else RayPPOTrainer
        assert trainer.fit is base.fit and trainer._save_checkpoint is base._save_checkpoint
        assert trainer.fit.__wrapped__ is not None and hasattr(trainer.fit, "_rl_backend_changed")
