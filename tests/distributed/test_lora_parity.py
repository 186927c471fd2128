"""Tenants of one batch train in every layout of both runtimes as peft trains them one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parity_lora import cases, compare, is_close, train_alone, write_models
from tests.support.matrix import sampled
from tests.support.peft_reference import Steps
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Steps]]:
    """Model -> what peft gives, once it is asked for."""
    return {}


@pytest.mark.shows("lora: tenants in one batch train as with peft one by one in both runtimes, with tp, ep, dp, pp and DoRA")
@pytest.mark.parametrize(
    ("layout", "model"),
    sampled(
        cases(),
        *(("native one rank", "one head of keys"), ("native tp2", "dense"), ("bridge tp2", "mixture")),
    ),
)
def test_tenants_in_one_batch_train_as_peft_does_one_by_one(
    ranks: RankPool, models: dict[str, Path], alone: dict[str, dict[str, Steps]], layout: str, model: str
) -> None:
    if model not in alone:
        alone[model] = train_alone(model, models[model])
    cell = compare(ranks, layout, model, models[model], alone[model])
    assert is_close(cell), cell
    assert cell.keys() == {"LoRA", "DoRA"}
