"""LoRA tenants train in every layout as on one rank, and each as it would alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.native import assert_near
from tests.support.rank_pool import RankPool
from tests.support.tenants import CONFIGS, TenantRun, tenants_job

NAMES = tuple(CONFIGS)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2 recomputed": (2, {"activation_checkpointing": "full"}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "tp4": (4, {"parallel": {"tp": 4}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "tp2 cp2": (4, {"parallel": {"tp": 2, "cp": 2}}),
    "dp2 tp2": (4, {"parallel": {"tp": 2}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "pp2 zb-h1": (2, {"parallel": {"pp": 2}, "pipeline_schedule": "zb-h1"}),
    "pp2 zbv": (2, {"parallel": {"pp": 2, "vpp": 2}, "pipeline_schedule": "zbv"}),
    "dp2 pp2 recomputed": (4, {"parallel": {"pp": 2}, "activation_checkpointing": "full"}),
}

BRIDGE: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "recomputed": (1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    "dp2": (2, {}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "dp2 tp2": (4, {"parallel": {"tp": 2}}),
    "tp2 pp2 vpp2": (4, {"parallel": {"tp": 2, "pp": 2, "vpp": 2}}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers, so that pipelines have two stages on each of two ranks."""
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_hidden_layers=4))


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: str) -> dict[str, TenantRun]:
    return ranks.run(tenants_job, model, NAMES, {}, world_size=1)[0]


@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        [*(("native", layout) for layout in LAYOUTS), *(("bridge", layout) for layout in BRIDGE)],
        *(("native", "tp2"), ("native", "cp2"), ("native", "pp2 zbv"), ("native", "dp2 recomputed"), ("bridge", "tp2")),
    ),
)
def test_tenants_train_in_every_layout_as_on_one_rank(
    ranks: RankPool, model: str, on_one_rank: dict[str, TenantRun], backend: str, layout: str
) -> None:
    world_size, settings = (BRIDGE if backend == "bridge" else LAYOUTS)[layout]
    found = ranks.run(tenants_job, model, NAMES, settings, 3, backend, world_size=world_size)
    for name, expected in on_one_rank.items():
        losses = next(run[name].losses for run in found if any(run[name].losses))
        assert losses == pytest.approx(expected.losses, rel=1e-6)
        for run in found:
            assert run[name].norms == pytest.approx(expected.norms, rel=1e-5)
            assert_near(run[name].gradients, expected.gradients)


@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        [*(("native", layout) for layout in ("one rank", *LAYOUTS)), *(("bridge", layout) for layout in BRIDGE)],
        *(("native", "tp2"), ("native", "pp2 zbv"), ("bridge", "dp2")),
    ),
)
def test_a_tenant_is_the_same_to_the_last_bit_alone_and_beside_others(
    ranks: RankPool, model: str, backend: str, layout: str
) -> None:
    world_size, settings = (1, {}) if layout == "one rank" else (BRIDGE if backend == "bridge" else LAYOUTS)[layout]
    together = ranks.run(tenants_job, model, NAMES, settings, 3, backend, world_size=world_size)
    for name in NAMES:
        alone = ranks.run(tenants_job, model, (name,), settings, 3, backend, world_size=world_size)
        for mine, beside in zip(alone, together, strict=True):
            assert mine[name].norms == beside[name].norms
            assert all(torch.equal(*pair) for pair in zip(mine[name].state, beside[name].state, strict=True))


def test_tenants_of_different_ranks_and_targets_differ(on_one_rank: dict[str, TenantRun]) -> None:
    narrow, wide = on_one_rank["narrow"].factors, on_one_rank["wide"].factors
    assert {value.shape[0] for name, value in narrow.items() if "lora_A" in name} == {4}
    assert {value.shape[1] for name, value in wide.items() if "lora_B" in name} == {64}
    assert not any("mlp" in name for name in narrow) and not any("q_proj" in name for name in wide)
    assert all(bool(value.any()) for value in narrow.values())
