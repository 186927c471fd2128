"""Adapters beside latent attention, experts and shared experts train in every layout as on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.deepseek import write_latent
from tests.support.native import relative_difference
from tests.support.rank_pool import RankPool
from tests.support.tenants import CONFIGS, TenantRun, tenants_job

NAMES = tuple(CONFIGS)
CHANGES: dict[str, dict[str, Any]] = {
    "narrow": {"targets": ("attention",), "use_dora": True},
    "middle": {"targets": ("q_a_proj", "kv_b_proj", "feed_forward", "experts")},
    "wide": {"targets": ("kv_a_proj_with_mqa", "q_b_proj", "o_proj", "down_proj")},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 ep2": (2, {"parallel": {"tp": 2, "ep": 2}}),
    # Adapters of kv_b_proj work on a rank's own tokens, so that keys and values are gathered.
    "cp2 ep2": (2, {"parallel": {"cp": 2, "ep": 2}}),
    "tp2 cp2 recomputed": (4, {"parallel": {"tp": 2, "cp": 2}, "activation_checkpointing": "full"}),
    "pp2 zbv": (2, {"parallel": {"pp": 2, "vpp": 2}, "pipeline_schedule": "zbv"}),
}
QUICK = ("tp2 ep2", "cp2 ep2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_latent("deepseek_v3", tmp_path_factory.mktemp("lora") / "model", num_hidden_layers=4))


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: str) -> dict[str, TenantRun]:
    return ranks.run(tenants_job, model, NAMES, {}, 3, "native", CHANGES, world_size=1)[0]


@pytest.mark.shows("lora: adapters of latent attention, experts and shared experts train in every layout as on one rank")
@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_tenants_train_in_every_layout_as_on_one_rank(
    ranks: RankPool, model: str, on_one_rank: dict[str, TenantRun], layout: str
) -> None:
    world_size, settings = LAYOUTS[layout]
    found = ranks.run(tenants_job, model, NAMES, settings, 3, "native", CHANGES, world_size=world_size)
    for name, expected in on_one_rank.items():
        losses = next(run[name].losses for run in found if any(run[name].losses))
        assert losses == pytest.approx(expected.losses, rel=3e-6)
        for run in found:
            assert run[name].norms == pytest.approx(expected.norms, rel=1e-5)
            assert run[name].gradients.keys() == expected.gradients.keys()
            for factor, gradient in expected.gradients.items():
                assert relative_difference(run[name].gradients[factor], gradient) < 1e-5, factor


@pytest.mark.shows("lora: tenants over latent attention train on the bridge as natively, with the bits that they have alone")
def test_the_bridge_trains_them_as_the_native_runtime_and_as_alone(
    ranks: RankPool, model: str, on_one_rank: dict[str, TenantRun]
) -> None:
    beside = ranks.run(tenants_job, model, NAMES, {}, 1, "bridge", CHANGES, world_size=1)[0]
    for name, expected in on_one_rank.items():
        assert beside[name].losses == pytest.approx(expected.losses[:1], rel=3e-6)
        assert beside[name].gradients.keys() == expected.gradients.keys()
        for factor, gradient in expected.gradients.items():
            assert relative_difference(beside[name].gradients[factor], gradient) < 1e-5, factor
    # Padded to the longest sequence, this one would be padded further beside the others.
    alone = ranks.run(tenants_job, model, ("narrow",), {}, 1, "bridge", CHANGES, world_size=1)[0]["narrow"]
    assert alone.losses == beside["narrow"].losses
    assert all(torch.equal(*pair) for pair in zip(alone.state, beside["narrow"].state, strict=True))
