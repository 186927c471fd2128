"""Weights from a trainer into running vLLM engines, through shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.rollout_config import RolloutConfig, SamplingConfig
from actors.rollout_group import RolloutGroup
from actors.weight_sync import WeightSync
from tests.support.rollout import ReferenceTrainer

PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), list(range(40, 10, -1))]
SAMPLING = SamplingConfig(max_new_tokens=8)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def group(ray_cluster: None, tied_model: Path) -> Iterator[RolloutGroup]:
    config = RolloutConfig(
        model_path=str(tied_model), num_engines=2, device="cpu", dtype="float32", max_model_len=256, kv_cache_gib=0.25
    )
    with RolloutGroup(config) as rollout:
        yield rollout


@pytest.fixture(scope="module")
def trainer(tied_model: Path) -> ReferenceTrainer:
    return ReferenceTrainer(tied_model)


@pytest.fixture(scope="module")
def sync(group: RolloutGroup, trainer: ReferenceTrainer) -> Iterator[WeightSync]:
    with WeightSync(trainer.source, group) as weight_sync:
        yield weight_sync


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return itertools.count(1)


def test_a_push_makes_every_engine_sample_from_the_trainers_weights(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync, versions: Iterator[int]
) -> None:
    trainer.change(next(versions))
    report = sync.push()
    assert report.transport == "shared_memory"
    assert report.engines == (0, 1)
    samples = group.generate(PROMPTS, SAMPLING, require_version=report.version)
    assert {sample.engine for sample in samples} == {0, 1}
    assert all(set(sample.weight_versions) == {report.version} for sample in samples)
    assert trainer.mean_gap(samples) <= TOLERANCE
