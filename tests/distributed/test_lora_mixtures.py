"""Adapters over GLM-4.5, gpt-oss and MiniMax-M2 are the same alone and beside others, and in layouts as on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rl_backend.contracts import ConfigError, OptimizerConfig
from rl_backend.contracts.lora import LoRAConfig
from tests.support.moe import write_moe
from tests.support.native import open_runtime, relative_difference
from tests.support.rank_pool import RankPool
from tests.support.tenants import CONFIGS, tenants_job

NAMES = tuple(CONFIGS)
TARGETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "glm4_moe": {
        "narrow": ("attention",),
        "middle": ("q_proj", "experts"),
        "wide": ("o_proj", "feed_forward"),
    },
    # Its experts are one tensor with biases.
    "gpt_oss": {"narrow": ("attention",), "middle": ("q_proj", "v_proj"), "wide": ("o_proj", "head")},
    "minimax_m2": {"narrow": ("attention",), "middle": ("q_proj", "experts"), "wide": ("o_proj", "w2")},
}
CHANGES: Mapping[str, dict[str, dict[str, Any]]] = {
    family: {name: {"targets": targets} for name, targets in found.items()} for family, found in TARGETS.items()
}
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "tp2 ep2": (2, {"parallel": {"tp": 2, "ep": 2}}),
    "cp2 etp2": (2, {"parallel": {"cp": 2, "etp": 2}}),
    "pp2 zbv": (2, {"parallel": {"pp": 2, "vpp": 2}, "pipeline_schedule": "zbv"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: str(write_moe(family, folder / family, num_hidden_layers=4)) for family in TARGETS}


@pytest.mark.shows("lora: tenants over GLM-4.5, gpt-oss and MiniMax-M2 are the same alone and beside others, to the bit")
@pytest.mark.parametrize("family", TARGETS)
def test_a_tenant_is_the_same_to_the_last_bit_alone_and_beside_others(models: dict[str, str], family: str) -> None:
    together = tenants_job(models[family], NAMES, {}, 2, "native", CHANGES[family])
    for name in NAMES:
        alone = tenants_job(models[family], (name,), {}, 2, "native", CHANGES[family])
        assert alone[name].norms == together[name].norms
        assert all(torch.equal(*pair) for pair in zip(alone[name].state, together[name].state, strict=True))


@pytest.mark.shows("lora: tenants over GLM-4.5, gpt-oss and MiniMax-M2 train with tp, cp, ep, etp and pp as on one rank")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) == ("gpt_oss", "tp2 ep2") else pytest.mark.long)
        for family in TARGETS
        for layout in LAYOUTS
    ],
)
def test_tenants_train_in_layouts_as_on_one_rank(ranks: RankPool, models: dict[str, str], family: str, layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    job = (models[family], NAMES)
    (expected,) = ranks.run(tenants_job, *job, {}, 2, "native", CHANGES[family], world_size=1)
    found = ranks.run(tenants_job, *job, settings, 2, "native", CHANGES[family], world_size=world_size)
    for name, run in expected.items():
        losses = next(each[name].losses for each in found if any(each[name].losses))
        assert losses == pytest.approx(run.losses, rel=3e-6)
        for each in found:
            assert each[name].norms == pytest.approx(run.norms, rel=1e-5)
            for factor, gradient in run.gradients.items():
                assert relative_difference(each[name].gradients[factor], gradient) < 1e-5, factor


def test_experts_of_gpt_oss_are_not_adapted(models: dict[str, str]) -> None:
    with open_runtime(models["gpt_oss"]) as runtime:
        base = runtime.build_model(trainable=False)
        with pytest.raises(
            ConfigError, match=r"LoRAConfig\.targets='experts': the model has none, or none that can be adapted"
        ):
            runtime.create_lora_adapter(
                base, LoRAConfig(rank=4, targets=("experts",)), OptimizerConfig(lr=1e-3), name="experts"
            )
