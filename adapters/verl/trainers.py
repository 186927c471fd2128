"""Changes to verl's trainers: one record for all saves of a step, and groups that stay on one rank."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from adapters.verl.late_imports import when_imported, wrap_once
from adapters.verl.registration import is_ours
from rl_backend.checkpoint.durable_commit import rename_synced, write_synced

# Module -> the class that saves and, with its subclasses in main_ppo, ends training.
_TRAINERS = {"verl.trainer.ppo.v1.trainer_base": "PPOTrainer", "verl.trainer.ppo.ray_trainer": "RayPPOTrainer"}


def register_saves() -> None:
    """Records and waits for the saves of a step, where a role saves in the background."""
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


GROUPER = "use_prefix_grouper"


def register_prefix_groups() -> None:
    """Tells a role's engine of ``use_prefix_grouper``, and keeps groups on one rank where a rank has room."""
    when_imported("verl.workers.config.actor", _change_configuration)
    when_imported("verl.trainer.ppo.v1.trainer_base", _change_trainer)


def _change_configuration(module: ModuleType) -> None:
    wrap_once(module.McoreActorConfig, "__post_init__", _tell_engine)


def _tell_engine(original: Callable[..., None], role: Any) -> None:
    original(role)
    if role.get(GROUPER):
        # An engine gets this part alone of a role's configuration. It is frozen, and verl's own class has no such field.
        object.__setattr__(role.engine, GROUPER, True)
        if hasattr(role.engine, "backend"):
            from adapters.verl.options.settings import require_engine_config

            require_engine_config(role.engine)


def _change_trainer(module: ModuleType) -> None:
    wrap_once(module.PPOTrainer, "_balance_batch", _balance_groups)


def _balance_groups(
    original: Callable[..., Any],
    trainer: Any,
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    **options: Any,
) -> Any:
    # Only verl's deprecated trainer keeps groups together; this one spreads them over the ranks.
    batch = original(trainer, batch, metrics, logging_prefix, **options)
    actor = trainer.config.actor_rollout_ref.actor
    if is_ours(actor) and actor.get(GROUPER):
        from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

        lengths = [tag["seq_len"] for tag in batch.tags]
        work = calculate_workload(torch.tensor(lengths)).tolist()
        # Keys begin with the uid of their prompt, by which verl's replay buffer too knows a group.
        groups = [key.split("_")[0] for key in batch.keys]
        ranks = rows_of_ranks(groups, work, max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1)
        batch.reorder([row for rows in ranks for row in rows])
        metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=ranks, prefix=logging_prefix))
    return batch


def rows_of_ranks(groups: Sequence[str], work: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The rows of each rank, equally many and of similar work: groups stay whole where a rank has room, in their order."""
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    room, load = [len(groups) // num_ranks] * num_ranks, [0.0] * num_ranks
    # The most work first (longest-processing-time rule), as the runtime balances micro-batches.
    for rows in sorted(members.values(), key=lambda rows: -sum(work[row] for row in rows)):
        left = rows
        while left:
            fitting = [rank for rank in range(num_ranks) if room[rank] >= len(left)]
            rank = min(fitting, key=load.__getitem__) if fitting else max(range(num_ranks), key=room.__getitem__)
            taken, left = left[: room[rank]], left[room[rank] :]
            ranks[rank].append(taken)
            room[rank] -= len(taken)
            load[rank] += sum(work[row] for row in taken)
    return [[row for rows in sorted(of_rank) for row in rows] for of_rank in ranks]
