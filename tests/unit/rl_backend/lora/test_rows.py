"""A tenant's numbers on a rank: how its factors start, and the dropout that is its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lora.modules import AdaptedModule
from rl_backend.lora.rows import TenantRows, factors_of
from rl_backend.primitive.adapters import dropped

INPUTS, OUTPUTS = 400, 25
QUERY, KEY = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def rows_of(seed: int = 0, **options: Any) -> TenantRows:
    """Of a tenant of two modules of the same sizes."""
    config = LoRAConfig(rank=4, seed=seed, **options)
    modules = [AdaptedModule(name, "attention", INPUTS, OUTPUTS, (0, INPUTS), (0, OUTPUTS)) for name in (QUERY, KEY)]
    tensors = [tensor for module in modules for tensor in factors_of(module, config)]
    return TenantRows.new(config, tensors, torch.device("cpu"), {}, lambda module: None)


def test_first_factors_are_pefts_and_differ_by_seed_and_module() -> None:
    modules, bound = rows_of().modules, 1 / math.sqrt(INPUTS)
    first = modules[QUERY].a
    assert 0.95 * bound < float(first.abs().max()) <= bound
    assert not modules[QUERY].b.any()
    assert torch.equal(rows_of(dropout=0.5).modules[QUERY].a, first)
    for other in (modules[KEY].a, rows_of(seed=1).modules[QUERY].a):
        assert not torch.equal(other, first)


def kept(rows: TenantRows, module: str, draw: int | None) -> Tensor:
    """What dropout makes of ones."""
    return dropped(torch.ones(50, INPUTS), draw, rows.modules[module])


@pytest.mark.shows("lora: dropout of a tenant is drawn by its own seed, anew for each module and micro-batch")
def test_dropout_is_drawn_anew_for_each_tenant_module_and_draw_and_keeps_the_mean() -> None:
    rows = rows_of(dropout=0.5)
    first = kept(rows, QUERY, 3)
    assert first.unique().tolist() == [0.0, 2.0]
    assert float(first.mean()) == pytest.approx(1.0, abs=0.03)
    assert torch.equal(kept(rows_of(dropout=0.5), QUERY, 3), first), "a tenant that is made again goes on with its own"
    for other in (kept(rows, KEY, 3), kept(rows, QUERY, 4), kept(rows_of(seed=1, dropout=0.5), QUERY, 3)):
        assert float((other == first).float().mean()) == pytest.approx(0.5, abs=0.03)
    assert torch.equal(kept(rows, QUERY, None), torch.ones(50, INPUTS))
