"""Adapters of experts, embeddings and heads, and DoRA, train in every layout as on one rank, and each as it would alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.native import assert_equal_tensors, assert_near, open_runtime
from tests.support.rank_pool import RankPool
from tests.support.tenant_layouts import NATIVE, assert_as_on_one_rank, assert_same_bits_alone, cases, train
from tests.support.tenants import CONFIGS, TenantRun, copied, create, rows, train_tenants

NAMES = tuple(CONFIGS)
CHANGES: dict[str, dict[str, Any]] = {
    "narrow": {"targets": ("attention", "experts"), "use_dora": True},
    "middle": {"targets": ("experts", "embedding", "q_proj"), "experts_share_factor": True},
    "wide": {"targets": ("gate_proj", "down_proj", "head", "o_proj")},
}
LAYOUTS = (
    *("dp2", "ep2", "ep2 recomputed", "tp2", "tp2 ep2", "tp2 etp2", "cp2 ep2"),
    *("pp2", "pp2 zb-h1", "pp2 zbv", "pp2 ep2", "dp2 tp2 ep2 etp2"),
)
BRIDGE = ("one rank", "recomputed", "dp2", "ep2", "tp2 etp2", "tp2 ep2", "pp2", "dp2 tp2 ep4")
EXACT = ("one rank", "ep2", "tp2 ep2", "tp2 etp2", "cp2 ep2", "pp2 zbv")
"""Of the native runtime. Not tp2: its ranks have copies of the experts, and which has a token depends on what is beside."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers, so that pipelines have two stages on each of two ranks."""
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    path = tmp_path_factory.mktemp("models") / "qwen3_moe"
    return str(write_tiny("qwen3_moe", path, num_hidden_layers=4, tie_word_embeddings=False, **changes))


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: str) -> dict[str, TenantRun]:
    return train(ranks, model, NAMES, "native", "one rank", changes=CHANGES)[0]


def test_all_of_a_mixture_is_adapted(on_one_rank: dict[str, TenantRun]) -> None:
    for name, ends in (
        ("narrow", ("experts.3.down_proj.lora_B.weight", "experts.0.up_proj.lora_magnitude_vector")),
        ("middle", ("embed_tokens.lora_embedding_A", "experts.w1.lora_B.weight", "experts.w2.lora_B.weight")),
        ("wide", ("lm_head.lora_B.weight", "experts.2.gate_proj.lora_B.weight")),
    ):
        run = on_one_rank[name]
        for end in ends:
            assert any(each.endswith(end) and bool(value.any()) for each, value in run.gradients.items()), end
        assert all(bool(value.any()) for value in run.factors.values())


@pytest.mark.shows("lora: adapters of experts, embeddings and heads, and DoRA, train in every layout as on one rank")
@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        cases(LAYOUTS, BRIDGE),
        *(("native", "tp2 etp2"), ("native", "pp2 zbv"), ("bridge", "tp2 ep2")),
    ),
)
def test_tenants_train_in_every_layout_as_on_one_rank(
    ranks: RankPool, model: str, on_one_rank: dict[str, TenantRun], backend: str, layout: str
) -> None:
    assert_as_on_one_rank(train(ranks, model, NAMES, backend, layout, changes=CHANGES), on_one_rank)


@pytest.mark.shows("lora: tenants of the experts of a mixture are the same alone and beside others, to the bit")
@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        cases(EXACT, BRIDGE),
        *(("native", "ep2"), ("bridge", "ep2")),
    ),
)
def test_a_tenant_is_the_same_to_the_last_bit_alone_and_beside_others(
    ranks: RankPool, model: str, backend: str, layout: str
) -> None:
    changes = {name: {**change, "dropout": 0.1} for name, change in CHANGES.items()}
    assert_same_bits_alone(ranks, model, NAMES, backend, layout, steps=2, changes=changes)


def beside_nan_job(model: str, names: Sequence[str], settings: Mapping[str, Any]) -> list[Tensor]:
    """The rows of ``narrow`` after three steps; before the last two the weights of any other become NaN."""
    with open_runtime(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, names, CHANGES)
        train_tenants(runtime, base, tenants, 1)
        for name in names[1:]:
            tenants[name].rows.weights.fill_(float("nan"))
        train_tenants(runtime, base, tenants, 2, first=1)
        return rows(tenants["narrow"])


@pytest.mark.parametrize("layout", ["one rank", "ep2"])
def test_nan_of_another_tenant_changes_no_bit(ranks: RankPool, model: str, layout: str) -> None:
    world_size, settings = NATIVE[layout]
    alone = ranks.run(beside_nan_job, model, ("narrow",), settings, world_size=world_size)
    beside = ranks.run(beside_nan_job, model, ("narrow", "middle", "wide"), settings, world_size=world_size)
    for mine, other in zip(alone, beside, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True))


def saved_job(model: str, path: str, settings: Mapping[str, Any], resumed: bool, shares: bool) -> list[dict[str, Tensor]]:
    """Factors of ``middle`` at a checkpoint, and after another step."""
    with open_runtime(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, ("middle",), targets=("experts", "head"), experts_share_factor=shares)
        if resumed:
            runtime.load_checkpoint(tenants["middle"], Path(path))
        else:
            train_tenants(runtime, base, tenants, 2)
            runtime.save_checkpoint(tenants["middle"], Path(path))
        saved = copied(runtime.export_lora_adapter(tenants["middle"]))
        train_tenants(runtime, base, tenants, 1, first=2)
        return [saved, copied(runtime.export_lora_adapter(tenants["middle"]))]


@pytest.mark.parametrize("layout", sampled(["tp2 etp2", "pp2"], "tp2 etp2"))
def test_experts_of_a_checkpoint_go_on_in_any_layout(ranks: RankPool, model: str, tmp_path: Path, layout: str) -> None:
    path, shares = str(tmp_path / "tenant"), layout == "tp2 etp2"
    saved, after = ranks.run(saved_job, model, path, NATIVE["ep2"][1], False, shares, world_size=2)[0]
    world_size, settings = NATIVE[layout]
    for found, gone_on in ranks.run(saved_job, model, path, settings, True, shares, world_size=world_size):
        assert_equal_tensors(found, saved)
        assert_near(gone_on, after, 1e-4)
