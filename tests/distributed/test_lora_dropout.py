"""Dropout of a tenant over ranks: those with other tokens drop other inputs, those of one replica the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data.micro_batches import pack
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, assert_near, open_runtime
from tests.support.rank_pool import RankPool
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import batches, copied, create, nll
from tests.support.tenants import rows as state_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3"))


def gradients_job(model: str, settings: Mapping[str, Any], dropout: float) -> tuple[Tensor, Mapping[str, Tensor]]:
    """This rank's gradients before they are added up, and whole ones; every rank has the same sequences."""
    with open_runtime(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        # Ranks of a replica have all inputs of these modules.
        tenants = create(runtime, base, ("narrow",), targets=("q_proj", "k_proj", "v_proj"), dropout=dropout)
        runtime.forward_backward(base, batches(tenants, 0, 0, 1), {"narrow": nll})
        mine = tenants["narrow"].rows.gradients.clone()
        return mine, copied(runtime.export_gradients(tenants["narrow"]))


@pytest.mark.shows("lora: data-parallel ranks drop inputs of their own, tensor-parallel ranks those that one rank drops")
def test_ranks_with_other_tokens_drop_other_inputs_and_those_of_a_replica_the_same(ranks: RankPool, model: str) -> None:
    for dropout in (0.0, 0.5):
        (first, _), (second, _) = ranks.run(gradients_job, model, {}, dropout, world_size=2)
        assert torch.equal(first, second) == (not dropout)
        ((_, expected),) = ranks.run(gradients_job, model, {}, dropout, world_size=1)
        for _, found in ranks.run(gradients_job, model, {"parallel": {"tp": 2}}, dropout, world_size=2):
            assert_near(found, expected)


def resumed_job(model: str, folder: str) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """A tenant's state after the step that follows a checkpoint, and after that step again from the checkpoint; it has one
    run in a pass of rank 1, and two in those of rank 0.
    """
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, ("narrow", "middle"), dropout=0.5)
        narrow, middle = tenants.values()
        owners = [(narrow, middle), (narrow if base.data_parallel_rank == 0 else middle, middle)]

        def step(seed: int) -> None:
            rows = iter(random_token_sequences((10, 12, 9, 11), VOCAB_SIZE, seed + base.data_parallel_rank))
            owned = [
                [next(rows).with_fields(sequence_fields={LORA_FIELD: torch.tensor(owner.lora_id)}) for owner in each]
                for each in owners
            ]
            data = [pack(each, {"batch_num_tokens": 84.0, "dp_size": 2}) for each in owned]
            runtime.forward_backward(base, data, dict.fromkeys(tenants, nll))
            runtime.optimizer_step([narrow, middle], zero_grad=True)

        step(0)
        runtime.save_checkpoint(narrow, folder)
        step(2)
        undisturbed = state_of(narrow)
        runtime.load_checkpoint(narrow, Path(folder))
        step(2)
        return undisturbed, state_of(narrow)


@pytest.mark.shows("lora: with dropout a resumed tenant continues bit for bit, however its sequences are spread over ranks")
def test_a_resumed_tenant_drops_what_it_would_have_dropped_on_ranks_with_uneven_runs(
    ranks: RankPool, model: str, tmp_path: Path
) -> None:
    for undisturbed, resumed in ranks.run(resumed_job, model, str(tmp_path / "saved"), world_size=2):
        assert all(torch.equal(*pair) for pair in zip(undisturbed, resumed, strict=True))
