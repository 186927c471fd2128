"""verl's ``TrainingWorker`` under its ``RayWorkerGroup`` trains on our engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.support.verl_batches import make_batch, rows
from tests.support.verl_configs import role_configs

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="for verl's CPU platform; this machine has an accelerator"
)

OVERRIDES = ("engine.dtype=float32", "optim.lr=1e-3", "optim.total_training_steps=10")


def train_steps(model: Path, ranks: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
    from verl.workers.utils.losses import sft_loss

    configs = role_configs("sft", model, *OVERRIDES)
    config = TrainingWorkerConfig(
        model_type=configs.model_type,
        model_config=configs.model,
        engine_config=configs.engine,
        optimizer_config=configs.optimizer,
        checkpoint_config=configs.checkpoint,
    )
    pool = RayResourcePool(process_on_nodes=[ranks], use_gpu=False, max_colocate_count=1)
    group: Any = RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(TrainingWorker), config=config), device_name="cpu")
    try:
        group.reset()
        group.set_loss_fn(partial(sft_loss, config=None))
        found = []
        for seed in range(2):
            facts = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 38, "global_batch_size": 8}
            batch = make_batch(rows(seed), "full", **facts)
            tu.assign_non_tensor(batch, update_lr_scheduler=True)
            metrics = tu.get(group.train_batch(batch).get(), "metrics")
            found.append((metrics["loss"], metrics["grad_norm"]))
        return found
    finally:
        for worker in group.workers:
            ray.kill(worker)
        for placement in pool.pgs:
            ray.util.remove_placement_group(placement)


@pytest.mark.long
@pytest.mark.shows("verl: TrainingWorker under RayWorkerGroup trains alike on 1 and 2 ranks")
def test_a_worker_group_of_two_ranks_trains_as_one_of_one(ray_cluster: None, tied_model: Path) -> None:
    one, two = (train_steps(tied_model, ranks) for ranks in (1, 2))
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert one[0][1] > 0
