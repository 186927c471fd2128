"""Blocks as values: names of their parameters, what engines keep of a sequence, and layouts that do not divide them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from rl_backend.contracts import ConfigError, ModelOptions, PackedWeight, ParallelConfig
from rl_backend.model.blocks import CacheBytes, FeedForwardSpec, MixerSpec, divisors, linear_names, nearest, require_divided
from rl_backend.model.feedforward.dense import MLPNames, MLPSpec, SwiGLUSpec
from rl_backend.model.feedforward.moe import ExpertNames, MoESpec
from rl_backend.model.mixers.deltanet import DeltaNetSpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.mixers.mla import ChosenKeysSpec, IndexerSpec, MLASpec
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import Rotary
from rl_backend.primitive.router import RouterSettings

HIDDEN = 12
LATENT: dict[str, Any] = {
    "num_heads": 3,
    "kv_rank": 5,
    "plain_dim": 6,
    "value_dim": 7,
    "rotary": Rotary(4, 10.0),
    "interleaved": True,
    "scale": 0.3,
    "latent_eps": 1e-6,
}
GQA = GQASpec(num_heads=6, num_kv_heads=2, head_dim=8, rotary=Rotary(8, 10.0))
INDEXER = IndexerSpec(num_heads=2, head_dim=9, rotated=4, interleaved=True)
MIXERS: dict[str, tuple[MixerSpec, str]] = {
    "gqa": (GQA, "q_proj.weight k_proj.weight v_proj.weight o_proj.weight"),
    "gqa, everything": (
        GQASpec(
            num_heads=6,
            num_kv_heads=2,
            head_dim=8,
            rotary=Rotary(8, 10.0),
            qkv_bias=True,
            output_bias=True,
            qk_norm=True,
            output_name="dense",
            output_gate=True,
            sinks=True,
        ),
        "q_proj.weight q_proj.bias k_proj.weight k_proj.bias v_proj.weight v_proj.bias o_proj.weight=dense.weight "
        "o_proj.bias=dense.bias q_norm.weight k_norm.weight sinks",
    ),
    "mla": (
        MLASpec(query_rank=11, **LATENT),
        "q_a_proj.weight q_a_layernorm.weight q_b_proj.weight kv_a_proj_with_mqa.weight kv_a_layernorm.weight "
        "kv_b_proj.weight o_proj.weight",
    ),
    "mla, biases": (
        MLASpec(query_rank=11, bias=True, **LATENT),
        "q_a_proj.weight q_a_proj.bias q_a_layernorm.weight q_b_proj.weight kv_a_proj_with_mqa.weight "
        "kv_a_proj_with_mqa.bias kv_a_layernorm.weight kv_b_proj.weight o_proj.weight o_proj.bias",
    ),
    "mla, no latent of queries": (
        MLASpec(query_rank=None, **LATENT),
        "q_proj.weight kv_a_proj_with_mqa.weight kv_a_layernorm.weight kv_b_proj.weight o_proj.weight",
    ),
    "sparse": (
        MLASpec(query_rank=11, keys=ChosenKeysSpec(indexer=INDEXER, top_k=3), **LATENT),
        "q_a_proj.weight q_a_layernorm.weight q_b_proj.weight kv_a_proj_with_mqa.weight kv_a_layernorm.weight "
        "kv_b_proj.weight o_proj.weight indexer.wq_b.weight indexer.wk.weight indexer.k_norm.weight indexer.k_norm.bias "
        "indexer.weights_proj.weight",
    ),
    "sparse, follows": (
        MLASpec(query_rank=11, keys=ChosenKeysSpec(indexer=None, top_k=3), **LATENT),
        "q_a_proj.weight q_a_layernorm.weight q_b_proj.weight kv_a_proj_with_mqa.weight kv_a_layernorm.weight "
        "kv_b_proj.weight o_proj.weight",
    ),
    "deltanet": (
        DeltaNetSpec(num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=5),
        "in_proj_qkv.weight in_proj_z.weight in_proj_b.weight in_proj_a.weight conv1d.weight dt_bias decay.A_log=A_log "
        "norm.weight out_proj.weight",
    ),
    "deltanet, by key head": (
        DeltaNetSpec(num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=5, by_key_head=True),
        "in_proj_qkvz.weight in_proj_ba.weight conv1d.weight dt_bias decay.A_log=A_log norm.weight out_proj.weight",
    ),
}
ROUTER = RouterSettings(2, 1)
BIASED = RouterSettings(4, 1, bias=True, expert_bias=True)
BLOCKS: dict[str, tuple[FeedForwardSpec, str]] = {
    "swiglu": (SwiGLUSpec(8), "gate_proj.weight up_proj.weight down_proj.weight"),
    "swiglu, biases": (
        SwiGLUSpec(8, bias=True),
        "gate_proj.weight gate_proj.bias up_proj.weight up_proj.bias down_proj.weight down_proj.bias",
    ),
    "mlp": (MLPSpec(8, "gelu"), "up_proj.weight down_proj.weight"),
    "mlp, other names and biases": (
        MLPSpec(8, "gelu", True, MLPNames("fc1", "fc2")),
        "up_proj.weight=fc1.weight up_proj.bias=fc1.bias down_proj.weight=fc2.weight down_proj.bias=fc2.bias",
    ),
    "mixture": (
        MoESpec(ROUTER, 8),
        "gate.weight experts.gate_up_proj=experts.0.gate_proj.weight,experts.0.up_proj.weight,experts.1.gate_proj.weight,"
        "experts.1.up_proj.weight experts.down_proj=experts.0.down_proj.weight,experts.1.down_proj.weight",
    ),
    "clamped": (
        MoESpec(RouterSettings(2, 1, bias=True), 8, ExpertNames(router="router"), clamped=True),
        "gate.weight=router.weight gate.bias=router.bias experts.gate_up_proj experts.gate_up_proj_bias experts.down_proj "
        "experts.down_proj_bias",
    ),
}


def spelled(names: Mapping[str, Any], block: str) -> list[str]:
    """``parameter=stored`` without the block's name; once where both are the same."""
    found = []
    for parameter, stored in names.items():
        each = stored.names if isinstance(stored, PackedWeight) else (stored,)
        assert all(name.startswith(f"{block}.") for name in each)
        text = ",".join(name.removeprefix(f"{block}.") for name in each)
        found.append(parameter if text == parameter else f"{parameter}={text}")
    return found


def parameters(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


@pytest.mark.parametrize("case", MIXERS)
def test_a_mixer_has_the_parameters_that_it_names(case: str) -> None:
    spec, expected = MIXERS[case]
    names = spec.weight_names("model.layers.7")
    assert spelled(names, f"model.layers.7.{spec.module}") == expected.split()
    assert set(names) == parameters(spec.build(HIDDEN, NormSpec(1e-6)))
    assert spec.module == ("linear_attn" if case.startswith("delta") else "self_attn")


@pytest.mark.parametrize("case", BLOCKS)
def test_a_feed_forward_block_has_the_parameters_that_it_names(case: str) -> None:
    spec, expected = BLOCKS[case]
    names = spec.weight_names("model.layers.7")
    assert spelled(names, "model.layers.7.mlp") == expected.split()
    assert set(names) == parameters(spec.build(HIDDEN, ModelOptions()))


def test_a_mixture_with_shared_experts_and_biases_has_the_names_of_its_family() -> None:
    names = ExpertNames("moe", "w1", "w3", "w2", "bias", "shared", "router")
    spec = MoESpec(BIASED, 8, names, shared_intermediate_size=6, shared_gate=True)
    stored = spec.weight_names("layers.0")
    packed = stored.pop("experts.gate_up_proj"), stored.pop("experts.down_proj")  # type: ignore[attr-defined]
    assert [each.shape for each in packed] == [(4, 2), (4,)]
    assert packed[0].names[2:4] == ("layers.0.moe.experts.1.w1.weight", "layers.0.moe.experts.1.w3.weight")
    assert packed[1].names[3] == "layers.0.moe.experts.3.w2.weight"
    assert stored == {
        "gate.weight": "layers.0.moe.router.weight",
        "gate.bias": "layers.0.moe.router.bias",
        "gate.expert_bias.values": "layers.0.moe.bias",
        "shared_expert.gate_proj.weight": "layers.0.moe.shared.gate_proj.weight",
        "shared_expert.up_proj.weight": "layers.0.moe.shared.up_proj.weight",
        "shared_expert.down_proj.weight": "layers.0.moe.shared.down_proj.weight",
        "shared_expert_gate.weight": "layers.0.moe.shared_gate.weight",
    }
    assert parameters(spec.build(HIDDEN, ModelOptions())) == {*stored, "experts.gate_up_proj", "experts.down_proj"}


@pytest.mark.parametrize(
    ("spec", "tokens", "expected"),
    [
        (GQA, 100, CacheBytes(tokens=2 * 100 * 2 * 8 * 2)),
        (
            GQASpec(num_heads=6, num_kv_heads=3, head_dim=8, rotary=Rotary(8, 1.0), window=40),
            100,
            CacheBytes(2 * 40 * 3 * 8 * 2),
        ),
        (
            GQASpec(num_heads=6, num_kv_heads=3, head_dim=8, rotary=Rotary(8, 1.0), window=40),
            30,
            CacheBytes(2 * 30 * 3 * 8 * 2),
        ),
        (MIXERS["mla"][0], 100, CacheBytes(100 * (5 + 4) * 2)),
        (MIXERS["sparse"][0], 100, CacheBytes(100 * (5 + 4 + 9) * 2)),
        (MIXERS["sparse, follows"][0], 100, CacheBytes(100 * (5 + 4) * 2)),
        (
            DeltaNetSpec(num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=5, conv_width=3),
            100,
            CacheBytes(state=6 * 4 * 5 * 4 + 2 * (8 + 8 + 30) * 2),
        ),
    ],
)
def test_an_engine_keeps_these_bytes_of_a_sequence(spec: MixerSpec, tokens: int, expected: CacheBytes) -> None:
    assert spec.cache_bytes(tokens, 2) == expected


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (GQA, {"tp": 4}, r"ParallelConfig.tp=4: does not divide num_attention_heads=6 \(6 / 4 = 1.50\); use 3 or 6"),
        (
            GQASpec(num_heads=12, num_kv_heads=4, head_dim=8, rotary=Rotary(8, 1.0)),
            {"tp": 3},
            r"ParallelConfig.tp=3: num_key_value_heads=4 is no multiple of it \(4 / 3 = 1.33 heads a rank.*; use 2 or 4$",
        ),
        (MIXERS["mla"][0], {"tp": 2}, "tp=2: does not divide num_attention_heads=3"),
        (MIXERS["deltanet"][0], {"tp": 6}, "tp=6: does not divide linear_num_key_heads=2"),
        (SwiGLUSpec(8), {"tp": 3}, "tp=3: does not divide intermediate_size=8"),
        (MLPSpec(9, "relu"), {"tp": 2}, "tp=2: does not divide intermediate_size=9"),
        (MoESpec(BIASED, 8), {"ep": 3}, "ep=3: does not divide num_experts=4"),
        (MoESpec(BIASED, 8), {"etp": 3}, "etp=3: does not divide moe_intermediate_size=8"),
        (
            MoESpec(BIASED, 8, shared_intermediate_size=6),
            {"tp": 4},
            "tp=4: does not divide shared_expert_intermediate_size=6",
        ),
    ],
)
def test_a_layout_that_does_not_divide_a_block_is_refused(spec: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec.check_layout(ParallelConfig(**sizes))


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (GQA, {"tp": 6, "cp": 5, "ep": 7}),
        (GQA, {"tp": 2}),
        (MIXERS["sparse"][0], {"tp": 3, "cp": 2}),
        (MIXERS["deltanet"][0], {"tp": 2, "cp": 3}),
        (MoESpec(BIASED, 8), {"ep": 4, "etp": 8, "tp": 16}),
        (SwiGLUSpec(8), {"tp": 8, "cp": 3, "ep": 3}),
    ],
)
def test_a_layout_that_divides_a_block_passes(spec: Any, sizes: dict[str, int]) -> None:
    spec.check_layout(ParallelConfig(**sizes))


@pytest.mark.parametrize("training", ["warm_up", "sparse"])
@pytest.mark.parametrize("dimension", ["tp", "cp"])
def test_an_indexer_learns_on_ranks_with_all_heads_and_keys_alone(training: Any, dimension: str) -> None:
    spec = MLASpec(query_rank=11, keys=ChosenKeysSpec(indexer=INDEXER, top_k=3, training=training), **LATENT)
    spec.check_layout(ParallelConfig(ep=2, pp=2))
    with pytest.raises(ConfigError, match=rf"ParallelConfig\.{dimension}=3: model_cfg.indexer='{training}' needs all heads"):
        spec.check_layout(ParallelConfig(**{dimension: 3}))


def test_what_chooses_keys_says_so() -> None:
    sparse, follows = (
        MLASpec(query_rank=11, keys=ChosenKeysSpec(indexer=each, top_k=3), **LATENT) for each in (INDEXER, None)
    )
    warm = MLASpec(query_rank=11, keys=ChosenKeysSpec(indexer=INDEXER, top_k=3, training="warm_up"), **LATENT)
    assert [(each.chooses, each.follows, each.chosen_keys) for each in (sparse, follows, warm, GQA)] == [
        (True, False, 3),
        (True, True, None),
        (True, False, None),
        (False, False, None),
    ]


def test_the_advice_is_the_nearest_numbers_that_work() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1] and divisors(7) == [1, 7]
    assert nearest(5, [1, 2, 4, 8]) == "use 4 or 8" and nearest(9, [1, 3]) == "use 3" and nearest(1, [2, 4]) == "use 2"
    assert nearest(4, [2, 4, 8]) == "use 2 or 8"
    require_divided("tp", 4, "things", 8)
    with pytest.raises(ConfigError, match=r"^ParallelConfig\.ep=3: does not divide things=8 \(8 / 3 = 2\.67\); use 2 or 4$"):
        require_divided("ep", 3, "things", 8)


def test_linear_layers_are_named_in_order() -> None:
    assert linear_names(("a", "b"), "x.y", bias=False) == {"a.weight": "x.y.a.weight", "b.weight": "x.y.b.weight"}
    assert list(linear_names(("a", "b"), "x", bias=True).values()) == ["x.a.weight", "x.a.bias", "x.b.weight", "x.b.bias"]


def test_value_heads_that_keys_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"DeltaNetSpec\.num_value_heads=5: is no multiple of num_key_heads=2"):
        DeltaNetSpec(num_key_heads=2, num_value_heads=5, key_dim=4, value_dim=4)
    assert DeltaNetSpec(num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=5).features == (8, 8, 30)
