"""LoRA tenants train in every layout as on one rank, and each as it would alone."""

from __future__ import annotations

import pytest

from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.rank_pool import RankPool
from tests.support.tenant_layouts import assert_as_on_one_rank, assert_same_bits_alone, cases, train
from tests.support.tenants import CONFIGS, TenantRun

NAMES = tuple(CONFIGS)
# The head of the model is its embedding.
CHANGES = {"middle": {"targets": ("q_proj", "feed_forward", "head")}, "wide": {"targets": ("embedding", "head", "o_proj")}}
LAYOUTS = (
    *("dp2", "dp2 recomputed", "tp2", "tp4", "cp2", "tp2 cp2", "dp2 tp2"),
    *("pp2", "pp2 zb-h1", "pp2 zbv", "dp2 pp2 recomputed"),
)
BRIDGE = ("one rank", "recomputed", "dp2", "tp2", "pp2", "dp2 tp2", "tp2 pp2 vpp2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers, so that pipelines have two stages on each of two ranks."""
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_hidden_layers=4))


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: str) -> dict[str, TenantRun]:
    return train(ranks, model, NAMES, "native", "one rank", changes=CHANGES)[0]


@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        cases(LAYOUTS, BRIDGE),
        *(("native", "tp2"), ("native", "cp2"), ("native", "pp2 zbv"), ("native", "dp2 recomputed"), ("bridge", "tp2")),
    ),
)
def test_tenants_train_in_every_layout_as_on_one_rank(
    ranks: RankPool, model: str, on_one_rank: dict[str, TenantRun], backend: str, layout: str
) -> None:
    assert_as_on_one_rank(train(ranks, model, NAMES, backend, layout, changes=CHANGES), on_one_rank)


@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        cases(("one rank", *LAYOUTS), BRIDGE),
        *(("native", "tp2"), ("native", "pp2 zbv"), ("bridge", "dp2")),
    ),
)
def test_a_tenant_is_the_same_to_the_last_bit_alone_and_beside_others(
    ranks: RankPool, model: str, backend: str, layout: str
) -> None:
    assert_same_bits_alone(ranks, model, NAMES, backend, layout, changes=CHANGES)


def test_tenants_of_different_ranks_and_targets_differ(on_one_rank: dict[str, TenantRun]) -> None:
    narrow, wide = on_one_rank["narrow"].factors, on_one_rank["wide"].factors
    assert {value.shape[0] for name, value in narrow.items() if "lora_A" in name} == {4}
    assert {value.shape[1] for name, value in wide.items() if "lora_B" in name} == {64}
    assert any("lm_head.lora_B" in name for name in wide) and any("embed_tokens" in name for name in wide)
    assert not any("lm_head" in name for name in narrow) and not any("q_proj" in name for name in wide)
    assert all(bool(value.any()) for value in narrow.values())
