"""Dropout of a tenant over ranks: those with other tokens drop other inputs, those of one replica the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import write_tiny
from tests.support.native import assert_near, open_runtime
from tests.support.rank_pool import RankPool
from tests.support.tenants import batches, copied, create, nll


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
