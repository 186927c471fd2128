"""Layouts of runs with LoRA tenants, and what holds in each: tenants train as on one rank, and each as it would alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.support.native import assert_near
from tests.support.rank_pool import RankPool
from tests.support.tenants import TenantRun, tenants_job

type Layouts = Mapping[str, tuple[int, Mapping[str, Any]]]
"""Name -> ranks and settings of the backend."""

NATIVE: Layouts = {
    "one rank": (1, {}),
    "dp2": (2, {}),
    "dp2 recomputed": (2, {"activation_checkpointing": "full"}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "tp4": (4, {"parallel": {"tp": 4}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "pp2 zb-h1": (2, {"parallel": {"pp": 2}, "pipeline_schedule": "zb-h1"}),
    "pp2 zbv": (2, {"parallel": {"pp": 2, "vpp": 2}, "pipeline_schedule": "zbv"}),
    "ep2": (2, {"parallel": {"ep": 2}}),
    "ep2 recomputed": (2, {"parallel": {"ep": 2}, "activation_checkpointing": "full"}),
    "tp2 cp2": (4, {"parallel": {"tp": 2, "cp": 2}}),
    "tp2 ep2": (2, {"parallel": {"tp": 2, "ep": 2}}),
    "tp2 etp2": (2, {"parallel": {"tp": 2, "etp": 2}}),
    "cp2 ep2": (2, {"parallel": {"cp": 2, "ep": 2}}),
    "pp2 ep2": (4, {"parallel": {"pp": 2, "ep": 2}}),
    "dp2 tp2": (4, {"parallel": {"tp": 2}}),
    "dp2 tp2 recomputed": (4, {"parallel": {"tp": 2}, "activation_checkpointing": "full"}),
    "dp2 pp2 recomputed": (4, {"parallel": {"pp": 2}, "activation_checkpointing": "full"}),
    "dp2 tp2 ep2 etp2": (4, {"parallel": {"tp": 2, "ep": 2, "etp": 2}}),
}
BRIDGE: Layouts = {
    "one rank": (1, {}),
    "recomputed": (1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    "dp2": (2, {}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "pp2 vpp2": (2, {"parallel": {"pp": 2, "vpp": 2}}),
    "ep2": (2, {"parallel": {"ep": 2}}),
    "tp2 etp2": (2, {"parallel": {"tp": 2, "etp": 2}}),
    "tp2 ep2": (2, {"parallel": {"tp": 2, "ep": 2}}),
    "dp2 tp2": (4, {"parallel": {"tp": 2}}),
    "tp2 pp2 vpp2": (4, {"parallel": {"tp": 2, "pp": 2, "vpp": 2}}),
    "dp2 tp2 ep4": (4, {"parallel": {"tp": 2, "ep": 4}}),
}

type Changes = Mapping[str, Mapping[str, Any]] | None
"""Tenant -> fields of its configuration."""


def cases(native: Sequence[str], bridge: Sequence[str]) -> list[tuple[str, str]]:
    """(backend, layout)"""
    return [*(("native", layout) for layout in native), *(("bridge", layout) for layout in bridge)]


def train(
    ranks: RankPool, model: str, names: Sequence[str], backend: str, layout: str, steps: int = 3, changes: Changes = None
) -> list[dict[str, TenantRun]]:
    """The named tenants beside each other, on every rank."""
    world_size, settings = (BRIDGE if backend == "bridge" else NATIVE)[layout]
    return ranks.run(tenants_job, model, names, settings, steps, backend, changes, world_size=world_size)


def assert_as_on_one_rank(found: Sequence[Mapping[str, TenantRun]], on_one_rank: Mapping[str, TenantRun]) -> None:
    """Losses, norms and the gradients of the first step. Ranks that are not of the last stage have no losses."""
    for name, expected in on_one_rank.items():
        losses = next(run[name].losses for run in found if any(run[name].losses))
        assert losses == pytest.approx(expected.losses, rel=1e-6)
        for run in found:
            assert run[name].norms == pytest.approx(expected.norms, rel=1e-5)
            assert_near(run[name].gradients, expected.gradients)


def assert_same_bits_alone(
    ranks: RankPool, model: str, names: Sequence[str], backend: str, layout: str, steps: int = 3, changes: Changes = None
) -> None:
    """Norms, and weights and moments after the last step, of each tenant on every rank."""
    together = train(ranks, model, names, backend, layout, steps, changes)
    for name in names:
        alone = train(ranks, model, (name,), backend, layout, steps, changes)
        for mine, beside in zip(alone, together, strict=True):
            assert mine[name].norms == beside[name].norms
            assert all(torch.equal(*pair) for pair in zip(mine[name].state, beside[name].state, strict=True))
