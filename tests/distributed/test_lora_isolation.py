"""What another tenant does changes no bit of a tenant: data, NaN, a loss that fails, removal, refused input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import CheckpointError
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.rank_pool import RankPool
from tests.support.tenant_events import EVENTS, OPENS, watched_job
from tests.support.tenants import copied, create, rows, train_tenants


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3"))


@pytest.fixture(scope="module")
def alone(ranks: RankPool, model: str) -> Callable[..., Any]:
    """What a tenant does in a layout without any event; computed once."""

    @cache
    def of(backend: str, world_size: int, *sizes: tuple[str, int]) -> Any:
        return ranks.run(watched_job, model, None, backend, dict(sizes), world_size=world_size)

    return of


@pytest.mark.parametrize(
    ("backend", "world_size", "parallel"),
    sampled(
        [("native", 1, {}), ("native", 2, {"tp": 2}), ("native", 2, {}), ("bridge", 1, {}), ("bridge", 2, {"tp": 2})],
        *(("native", 2, {"tp": 2}), ("bridge", 1, {})),
    ),
)
@pytest.mark.parametrize("event", EVENTS)
def test_nothing_that_another_tenant_does_changes_a_bit(
    ranks: RankPool,
    model: str,
    alone: Callable[..., Any],
    event: str,
    backend: str,
    world_size: int,
    parallel: dict[str, int],
) -> None:
    expected = alone(backend, world_size, *parallel.items())
    assert ranks.run(watched_job, model, event, backend, parallel, world_size=world_size) == expected


def checkpoint_job(
    model: str, path: str, backend: str, parallel: Mapping[str, int], resumed: bool
) -> tuple[Mapping[str, Tensor], list[Tensor]]:
    """Five steps with a save after three; or, when ``resumed``, the last two, after loading it into a new tenant.

    Returns:
        The factors after three steps, and this rank's state after five.
    """
    with OPENS[backend](model, parallel=parallel) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, ("narrow", "middle"), dropout=0.1)
        if resumed:
            assert runtime.load_checkpoint(tenants["narrow"], Path(path)) == {}
            assert tenants["narrow"].weight_version == 3
            assert tenants["narrow"].trainer.schedule.num_steps == 3
        else:
            train_tenants(runtime, base, tenants, 3)
            runtime.save_checkpoint(tenants["narrow"], Path(path))
        factors = copied(runtime.export_lora_adapter(tenants["narrow"]))
        train_tenants(runtime, base, tenants, 2, first=3)
        return factors, rows(tenants["narrow"])


@pytest.mark.parametrize("saved_by", ["native", "bridge"])
@pytest.mark.parametrize(
    ("backend", "world_size", "parallel"),
    sampled(
        [
            *(("native", size, parallel) for size, parallel in ((1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {}))),
            *(("bridge", size, parallel) for size, parallel in ((1, {}), (2, {"tp": 2}), (2, {"pp": 2}))),
        ],
        *(("native", 2, {"tp": 2}), ("bridge", 2, {"pp": 2})),
    ),
)
def test_a_tenant_alone_is_saved_and_goes_on_in_any_layout_and_runtime(
    ranks: RankPool, model: str, tmp_path: Path, saved_by: str, backend: str, world_size: int, parallel: dict[str, int]
) -> None:
    path = str(tmp_path / "tenant")
    without_stopping = ranks.run(checkpoint_job, model, path, saved_by, {"tp": 2}, False, world_size=2)
    found = ranks.run(checkpoint_job, model, path, backend, parallel, True, world_size=world_size)
    for factors, _ in found:
        assert all(torch.equal(factors[name], value) for name, value in without_stopping[0][0].items())
    if (backend, parallel) == (saved_by, {"tp": 2}):
        for (_, mine), (_, other) in zip(without_stopping, found, strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True))
    assert [float(state[3]) for _, state in found] == [5.0] * world_size


def test_a_tenant_is_refused_on_another_base_and_with_other_ranks(ranks: RankPool, model: str, tmp_path: Path) -> None:
    path = str(tmp_path / "tenant")
    ranks.run(checkpoint_job, model, path, "native", {}, False, world_size=1)
    other = str(write_tiny("qwen3", tmp_path / "other", seed=5))
    assert "adapter of another base model" in ranks.run(refused_job, other, path, {}, world_size=1)[0]
    assert "LoRAConfig.rank=4, 'narrow' has 8" in ranks.run(refused_job, model, path, {"rank": 8}, world_size=1)[0]


def refused_job(model: str, path: str, changes: Mapping[str, Any]) -> str:
    """Why a tenant cannot be loaded."""
    with OPENS["native"](model) as runtime:
        base = runtime.build_model(trainable=False)
        tenant = create(runtime, base, ("narrow",), **{"dropout": 0.1, **changes})["narrow"]
        before = rows(tenant)
        with pytest.raises(CheckpointError) as refused:
            runtime.load_checkpoint(tenant, Path(path))
        assert all(torch.equal(*pair) for pair in zip(before, rows(tenant), strict=True))
        return str(refused.value)
