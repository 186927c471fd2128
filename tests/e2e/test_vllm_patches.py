"""Each change to vLLM is still needed: without it the log-probs after a push are wrong, with it they are right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors import TrainGroup
from actors.rollout.config import SamplingConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import AdapterVersion
from actors.sync.push import WeightSync
from actors.wire.factors import PackedFactors
from rl_backend.contracts import OptimizerConfig, WeightCheckError
from rl_backend.contracts.lora import LoRAConfig
from tests.support.rollout import ReferenceTrainer
from tests.support.served_tenants import ServedTenants

PROMPTS = [[5, 6, 7, 8], list(range(10, 60))]
SAMPLING = SamplingConfig(max_new_tokens=12)


@pytest.fixture(scope="module")
def trainer(exported_mixture: Path) -> ReferenceTrainer:
    return ReferenceTrainer(exported_mixture)


@pytest.fixture(scope="module")
def group(mixture_engine: RolloutGroup) -> RolloutGroup:
    mixture_engine.forget_weights()  # of other trainers
    return mixture_engine


@pytest.fixture(scope="module")
def sync(group: RolloutGroup, trainer: ReferenceTrainer) -> Iterator[WeightSync]:
    with WeightSync(trainer.source, group) as weight_sync:
        yield weight_sync


def gap_after_push_without(patch: str | None, group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync) -> float:
    trainer.advance(0.5)
    group.engine_set.call("leave_out", patch)
    sync.push()
    return trainer.mean_gap(group.generate(PROMPTS, SAMPLING))


@pytest.mark.shows("weight sync: mixture-of-experts models arrive correctly in vLLM on a CPU")
def test_a_mixture_of_experts_is_pushed_right_into_an_engine_with_other_weights(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    for _ in range(2):
        assert gap_after_push_without(None, group, trainer, sync) <= 1e-5


@pytest.mark.parametrize("patch", ["packing_experts_again", "packing_embeddings_again"])
def test_vllm_serves_old_weights_without_the_patch(
    patch: str, group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    assert gap_after_push_without(None, group, trainer, sync) <= 1e-5
    assert gap_after_push_without(patch, group, trainer, sync) > 1e-3
    assert gap_after_push_without(None, group, trainer, sync) <= 1e-5


@pytest.mark.shows("lora: adapters of a mixture's attention are served on a CPU; those of other modules are pushed merged")
def test_adapters_beside_experts(group: RolloutGroup, exported_mixture: Path, one_rank: TrainGroup) -> None:
    train = one_rank
    group.forget_weights()
    base, optimizer = train.build_model(hf_path=exported_mixture, trainable=False), OptimizerConfig(lr=2e-2)
    tenants = {
        name: train.create_lora_adapter(base, LoRAConfig(rank=rank, targets=(name,)), optimizer, name=name)
        for name, rank in (("attention", 4), ("o_proj", 2))
    }
    syncs = {name: WeightSync(train, group, tenant) for name, tenant in tenants.items()}
    served, tenant = ServedTenants(train, group, base, tenants, syncs), tenants["attention"]
    served.push_base()
    for push in range(2):
        for number, name in enumerate(tenants):
            served.step(name, 10 * push + number)
            syncs[name].push()
        served.assert_served(["attention", "o_proj", None, "o_proj", None, "attention"], served.versions())
    served.push_base()
    served.assert_served(["o_proj", "attention", None, "attention", None, "o_proj"], served.versions())
    assert served.gap(tenant, served.sample(None)) > 1e-5 < served.gap(tenant, served.sample("o_proj"))
    # Of other modules as they stand, whatever tenants may adapt.
    factors = train.export_lora_adapter(tenant)
    moved = {name.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): value for name, value in factors.items()}
    packed = PackedFactors.of({name: (value, 1.0) for name, value in moved.items()}, "float32")
    outcome = group.engine_set.call("push_adapter", AdapterVersion("experts", 1, 10**9, 4), packed, packed.digest)[0]
    assert isinstance(outcome, WeightCheckError)
    assert re.search(r"mlp\.experts\.0\.up_proj takes no adapters in this engine .* merged=True", str(outcome))
    with WeightSync(train, group, tenant, merged=True) as of_both:
        of_both.push()
    assert served.gap(tenant, served.sample(None)) < 1e-5
