"""Families that are Llama but for fields of their specification, in layouts of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import ParallelConfig, UnsupportedError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lab.parity.compare import Tolerances
from rl_backend.lab.parity.config import ParityConfig, ParitySide
from rl_backend.lab.parity.run import compare_sides, record_side
from tests.distributed.test_checkpoint_layouts import check
from tests.distributed.test_native_layouts import assert_same, run_layout
from tests.support.bridge_runs import open_bridge
from tests.support.checkpoint_layouts import Layout, load_in, native, save_in
from tests.support.rank_pool import RankPool
from tests.support.variants import write_variant

LAYOUTS: Mapping[str, list[tuple[dict[str, int], dict[str, Any]]]] = {
    "gemma": [({"tp": 2, "cp": 2}, {}), ({"pp": 2, "tp": 2}, {})],
    "gemma3_text": [({"tp": 2, "cp": 2}, {}), ({"pp": 2}, {})],
    "granite": [({"tp": 4}, {}), ({"pp": 2}, {})],
    "nemotron": [({"tp": 2}, {})],
    # Of four ranks, two have a copy of each head of keys.
    "olmo2": [({"tp": 4}, {}), ({"tp": 2, "cp": 2}, {"activation_checkpointing": "full"}), ({"pp": 2, "tp": 2}, {})],
    "phi": [({"tp": 4}, {}), ({"pp": 2, "vpp": 2}, {"pipeline_schedule": "zbv"})],
    "starcoder2": [({"tp": 2, "cp": 2}, {}), ({"pp": 2, "tp": 2}, {})],
}


@pytest.mark.shows(
    "runtime: Gemma 1 and 3, Granite, Nemotron, OLMo 2, Phi, StarCoder 2 with tp, cp, pp train as on one rank"
)
@pytest.mark.parametrize(
    "family",
    [family if family in ("gemma3_text", "phi") else pytest.param(family, marks=pytest.mark.long) for family in LAYOUTS],
)
def test_variants_train_in_every_layout_as_on_one_rank(ranks: RankPool, tmp_path: Path, family: str) -> None:
    # A vocabulary that tp does not divide, for the bias of Phi's head.
    changes: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 131}
    if family == "gemma3_text":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    else:
        # Fast angles: attention hardly depends on a bias of keys that are hardly turned.
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10.0}
    model = write_variant(family, tmp_path / "model", **changes)
    # Of gradients that are rounding, as those of features that hardly pass a squared ReLU, Adam makes no whole steps then.
    eps = 1e-4
    expected = run_layout(ranks, 1, model, {}, {}, eps=eps)
    for layout, settings in LAYOUTS[family]:
        assert_same(run_layout(ranks, 4, model, layout, settings, eps=eps), expected)


@pytest.mark.parametrize(
    ("family", "saver", "loader"),
    [
        pytest.param("olmo2", native(4, tp=4), native(2, pp=2), marks=pytest.mark.long),
        ("phi", native(2, pp=2), native(4, tp=2, cp=2)),
        pytest.param("starcoder2", native(2, tp=2), native(1), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_variant_goes_on_in_another_layout(
    ranks: RankPool, tmp_path: Path, family: str, saver: Layout, loader: Layout
) -> None:
    model = write_variant(family, tmp_path / "model")
    saved = save_in(ranks, model, tmp_path / "saved", saver)
    check(loader, saver, load_in(ranks, model, saved, tmp_path / "again", loader))


def refusal_job(model: str) -> str:
    with pytest.raises(UnsupportedError) as refused, open_bridge(model, {}) as runtime:
        runtime.build_model()
    return str(refused.value)


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("gemma", "layernorm_zero_centered_gamma"),
        ("gemma3_text", "Transformer Engine"),
        ("granite", "model_type='granite'"),
        ("nemotron", "normalization 'LayerNorm'"),
        ("olmo2", "model_type='olmo2'"),
        ("phi", "model_type='phi'"),
        ("starcoder2", "model_type='starcoder2'"),
    ],
)
def test_the_bridge_refuses_by_name_what_it_does_not_compute(
    ranks: RankPool, tmp_path: Path, family: str, named: str
) -> None:
    (message,) = ranks.run(refusal_job, str(write_variant(family, tmp_path / "model")), world_size=1)
    assert named in message


@pytest.mark.long
@pytest.mark.parametrize(("family", "tp"), [("olmo2", 4), ("phi", 2)])
def test_tenants_over_a_variant_train_with_tp_as_with_peft(tmp_path: Path, family: str, tp: int) -> None:
    model = write_variant(family, tmp_path / "model", pad_token_id=7)
    targets = ("attention", "feed_forward", "head")
    config = ParityConfig(
        model=str(model),
        reference=ParitySide(runtime="transformers"),
        candidate=ParitySide(runtime="native", parallel=ParallelConfig(tp=tp)),
        lora=LoRAConfig(rank=4, targets=targets),
        steps=2,
        device="cpu",
    )
    reference, candidate = (record_side(config, name, tmp_path / name) for name in ("reference", "candidate"))
    comparison = compare_sides(config, reference, candidate, Tolerances.of("float32"))
    assert comparison.first_divergence is None, str(comparison.first_divergence)
