"""verl's ``actor.use_prefix_grouper``: the role's engine is told of it, and verl's default trainer keeps groups together."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from adapters.verl.late_imports import when_imported, wrap_once
from adapters.verl.registration import is_ours

FIELD = "use_prefix_grouper"


def register() -> None:
    when_imported("verl.workers.config.actor", _change_configuration)
    when_imported("verl.trainer.ppo.v1.trainer_base", _change_trainer)


def _change_configuration(module: ModuleType) -> None:
    wrap_once(module.McoreActorConfig, "__post_init__", _tell_engine)


def _tell_engine(original: Callable[..., None], role: Any) -> None:
    original(role)
    if role.get(FIELD):
        # An engine gets this part alone of a role's configuration. It is frozen, and verl's own class has no such field.
        object.__setattr__(role.engine, FIELD, True)
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
    if is_ours(actor) and actor.get(FIELD):
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
