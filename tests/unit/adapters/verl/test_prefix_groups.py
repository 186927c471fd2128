"""``actor.use_prefix_grouper`` in verl: its engine knows of it, and groups stay whole where verl balances ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.verl.trainers import register_prefix_groups, rows_of_ranks

OURS = "adapters.verl.engine_config.RLBackendEngineConfig"


def spread(groups: list[str], ranks: list[list[int]]) -> int:
    """Between how many pairs of group and rank rows lie; as many as groups where none is divided."""
    return len({(groups[row], rank) for rank, rows in enumerate(ranks) for row in rows})


def test_groups_stay_whole_in_the_order_of_the_batch_and_work_is_even() -> None:
    groups = [name for name in "abcdef" for _ in range(4)]
    work = [10.0 * ("abcdef".index(name) + 1) for name in groups]
    ranks = rows_of_ranks(groups, work, 3)
    assert sorted(row for rows in ranks for row in rows) == list(range(24)) and spread(groups, ranks) == 6
    # The most work goes with the least: f and a, e and b, d and c; each rank has these as the batch has them.
    assert sorted("".join(dict.fromkeys(groups[row] for row in rows)) for rows in ranks) == ["af", "be", "cd"]
    assert all(rows == sorted(rows) for rows in ranks)


def test_groups_that_are_not_of_one_size_are_divided_only_where_ranks_have_no_room() -> None:
    generator = random.Random(0)
    for _ in range(50):
        num_ranks = generator.randint(1, 4)
        groups = [str(group) for group in range(5) for _ in range(generator.randint(1, 6))]
        generator.shuffle(groups)
        groups += ["padding"] * (-len(groups) % num_ranks)
        ranks = rows_of_ranks(groups, [generator.random() for _ in groups], num_ranks)
        assert sorted(row for rows in ranks for row in rows) == list(range(len(groups)))
        assert {len(rows) for rows in ranks} == {len(groups) // num_ranks}
        # A divided group fills a rank, so one rank fewer than there are divides at most.
        assert spread(groups, ranks) <= len(set(groups)) + num_ranks - 1


@pytest.mark.parametrize("grouper", [True, False])
def test_verls_own_class_too_brings_the_field_to_our_engine(grouper: bool) -> None:
    from verl.workers.config import McoreActorConfig

    from adapters.verl.engine_config import choose_engine

    register_prefix_groups()
    actor = McoreActorConfig(rollout_n=4, ppo_micro_batch_size_per_gpu=1, use_prefix_grouper=grouper)
    _, config = choose_engine("language_model", actor.engine, "native")
    assert type(actor.engine) is not type(config) and config.use_prefix_grouper is grouper


@pytest.mark.parametrize(
    ("target", "grouper", "together"), [(OURS, True, True), (OURS, False, False), ("verl.Other", True, False)]
)
def test_verls_trainer_keeps_groups_of_our_actor_on_a_rank(target: str, grouper: bool, together: bool) -> None:
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    register_prefix_groups()
    generator = random.Random(1)
    keys = [f"{group}_{session}_0" for group in "abcdefgh" for session in range(4)]
    tags: list[dict[str, Any]] = [{"seq_len": generator.randint(50, 400)} for _ in keys]
    batch = KVBatchMeta(keys=list(keys), tags=list(tags), partition_id="train")
    actor = SimpleNamespace(strategy="megatron", megatron={"_target_": target})
    actor.get = lambda name: {"strategy": "megatron", "use_prefix_grouper": grouper}.get(name)
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor)),
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1, 2, 2, 3, 3]}),
        tokenizer=SimpleNamespace(eos_token_id=0),
        _get_required_batch_multiple=lambda dp_size: dp_size,
    )
    metrics: dict[str, Any] = {}
    batch = PPOTrainer._balance_batch(trainer, batch, metrics=metrics)
    assert sorted(batch.keys) == sorted(keys)
    lengths = dict(zip(keys, (tag["seq_len"] for tag in tags), strict=True))
    assert [tag["seq_len"] for tag in batch.tags] == [lengths[key] for key in batch.keys]
    shares = [batch.keys[8 * rank :][:8] for rank in range(4)]
    assert (len({(key[0], rank) for rank, share in enumerate(shares) for key in share}) == 8) is together
    sums = [sum(lengths[key] for key in share) for share in shares]
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (min(sums), max(sums))


def test_a_rank_has_the_work_of_the_rows_that_it_took_of_a_group() -> None:
    rows = rows_of_ranks([*"aaaabbcde"], [5, 5, 5, 5, 8, 8, 10, 1, 1], 3)
    assert rows == [[0, 1, 2], [3, 6, 7], [4, 5, 8]]
