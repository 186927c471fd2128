"""In which order Megatron's parameters have the rows of Hugging Face's tensors, worked out by hand."""

from __future__ import annotations

import rl_backend.runtime.bridge.engine  # noqa: F401 - imports Megatron in the order that it needs

# isort: split

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    FusedExpertMapping,
    GatedMLPMapping,
    GDNConv1dMapping,
    GDNLinearMapping,
    GDNLinearMappingSeparate,
    KVMapping,
    QKVMapping,
    ReplicatedMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from torch import Tensor

from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.bridge.engine.sharding import StoredNames, StoredRows, keeps_rows, stored_rows
from rl_backend.runtime.bridge.model.conversion import Conversion

QKV, MLP = QKVMapping("qkv.weight", "q", "k", "v"), GatedMLPMapping("fc1.weight", "gate", "up")
AUTO = AutoMapping("fc2.weight", "down")


def test_only_mappings_that_put_rows_in_a_known_order_keep_them() -> None:
    delta = [GDNLinearMapping("in", "qkvz", "ba"), GDNLinearMappingSeparate("in", "qkv", "z", "b", "a")]
    for mapping in (QKV, MLP, AUTO, ReplicatedMapping("a", "b"), GDNConv1dMapping("conv", "stored"), *delta):
        assert keeps_rows(mapping), mapping
    for mapping in (
        AutoMapping("fc2.weight", "down", permute_dims=(1, 0)),
        RMSNorm2ZeroCenteredRMSNormMapping("norm.weight", "stored"),
        FusedExpertMapping("experts.linear_fc2.weight", "stored"),
        KVMapping("kv", "k", "v"),
    ):
        assert not keeps_rows(mapping), mapping


def rows(mapping: Any, block: str, shapes: Mapping[str, tuple[int, ...]], **config: Any) -> list[tuple[Any, ...]]:
    names = {part: f"stored.{part}" for part in shapes}
    found = stored_rows(mapping, block, names, shapes, SimpleNamespace(**config))
    # Without a gap from the first row on, and each with its whole tensor.
    stops = [0, *(each.stop for each in found)]
    assert [each.start for each in found] == stops[:-1]
    assert all(shapes[each.name.removeprefix("stored.")] == each.shape for each in found)
    return [(each.name.removeprefix("stored."), each.at, each.stop - each.start) for each in found]


def test_rows_of_one_tensor_and_of_gate_and_up_are_in_their_order() -> None:
    assert rows(AUTO, "layer.fc2.weight", {"": (7, 3)}) == [("", 0, 7)]
    assert rows(MLP, "layer.fc1.weight", {"up": (5, 3), "gate": (4, 3)}) == [("gate", 0, 4), ("up", 0, 5)]
    assert stored_rows(MLP, "fc1", {"gate": "g", "up": "u"}, {"gate": (4, 3), "up": (4, 3)}, None)[1] == StoredRows(
        4, 8, "u", (4, 3), 0
    )


def test_queries_of_a_group_are_beside_its_key_and_value() -> None:
    shapes = {"q": (12, 9), "k": (6, 9), "v": (4, 9)}
    config = {"num_attention_heads": 4, "attention_output_gate": False}
    assert rows(QKV, "linear_qkv.weight", shapes, num_query_groups=2, **config) == [
        ("q", 0, 6), ("k", 0, 3), ("v", 0, 2),
        ("q", 6, 6), ("k", 3, 3), ("v", 2, 2),
    ]  # fmt: skip
    # Without groups every head is one.
    every = {"q": (12, 9), "k": (12, 9), "v": (12, 9)}
    assert rows(QKV, "linear_qkv.weight", every, num_query_groups=None, **config)[3:6] == [
        ("q", 3, 3), ("k", 3, 3), ("v", 3, 3),
    ]  # fmt: skip


def test_gates_of_attention_are_behind_the_queries_of_a_group() -> None:
    # Two groups of two heads with 5 features; Hugging Face has query and gate of each head.
    shapes = {"q": (40, 9), "k": (10, 9), "v": (10, 9)}
    config = {"num_attention_heads": 4, "num_query_groups": 2, "attention_output_gate": True}
    assert rows(QKV, "linear_qkv.weight", shapes, **config) == [
        ("q", 0, 5), ("q", 10, 5), ("q", 5, 5), ("q", 15, 5), ("k", 0, 5), ("v", 0, 5),
        ("q", 20, 5), ("q", 30, 5), ("q", 25, 5), ("q", 35, 5), ("k", 5, 5), ("v", 5, 5),
    ]  # fmt: skip


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 4,
}
"""Each of two key heads has 5 features and three value heads of 4."""


@pytest.mark.parametrize(
    ("block", "fused", "separate"),
    [
        # Of each key head: 5 of its query, 5 of its key, 12 of its values and 12 of their gates.
        ("query", [("qkvz", 0, 5), ("qkvz", 34, 5)], ("qkv", 0, 10)),
        ("key", [("qkvz", 5, 5), ("qkvz", 39, 5)], ("qkv", 10, 10)),
        ("value", [("qkvz", 10, 12), ("qkvz", 44, 12)], ("qkv", 20, 24)),
        ("z", [("qkvz", 22, 12), ("qkvz", 56, 12)], ("z", 0, 24)),
        ("beta", [("ba", 0, 3), ("ba", 6, 3)], ("b", 0, 6)),
        ("alpha", [("ba", 3, 3), ("ba", 9, 3)], ("a", 0, 6)),
    ],
)
def test_blocks_of_deltanet_have_the_rows_of_all_heads(
    block: str, fused: list[tuple[str, int, int]], separate: tuple[str, int, int]
) -> None:
    name = f"layers.0.in_proj.weight.{block}"
    both = {"qkvz": (68, 2), "ba": (12, 2)}
    assert rows(GDNLinearMapping("in", "qkvz", "ba"), name, both, **DELTA) == fused
    parts = {"qkv": (44, 2), "z": (24, 2), "b": (6, 2), "a": (6, 2)}
    assert rows(GDNLinearMappingSeparate("in", "qkv", "z", "b", "a"), name, parts, **DELTA) == [separate]
    if block in ("query", "key", "value"):
        assert rows(GDNConv1dMapping("conv", "stored"), name, {"": (44, 1, 4)}, **DELTA) == [("", *separate[1:])]


def task(name: str, mapping: Any, weight: Tensor | None = None, stage: int = 0) -> Any:
    return SimpleNamespace(global_param_name=name, param_name=name, mapping=mapping, param_weight=weight, vp_stage=stage)


def test_names_are_found_by_the_tensor_or_by_its_name_and_those_of_experts_by_number() -> None:
    embedding, fused, norm = torch.zeros(8, 2), torch.zeros(6, 2), torch.zeros(2)
    expert = GatedMLPMapping("fc1", "experts.0.gate", "experts.0.up")
    conversions = [
        Conversion((task("embedding", AutoMapping("e", "embed"), embedding),), {"embed": (7, 2)}, torch.float32, True),
        Conversion(
            (task("layer.experts.0.fc1", expert, fused),),
            {f"experts.{number}.{part}": (3, 2) for number in (0, 2) for part in ("gate", "up")},
            torch.float32,
            True,
        ),
        Conversion(
            (task("norm", RMSNorm2ZeroCenteredRMSNormMapping("n", "norm"), norm),), {"norm": (2,)}, torch.float32, True
        ),
        Conversion((task("elsewhere", AutoMapping("o", "other")),), {"other": (4,)}, torch.float32, True),
    ]
    names = StoredNames(conversions, SimpleNamespace())
    assert names.private == ("norm",)
    # The eighth row pads the vocabulary.
    assert names.rows(embedding, "any key", 8, None) == (StoredRows(0, 7, "embed", (7, 2), 0),)
    assert names.rows(torch.zeros(1), "embedding", 7, None) == (StoredRows(0, 7, "embed", (7, 2), 0),)
    assert names.rows(torch.zeros(1), "elsewhere", 4, None) == (StoredRows(0, 4, "other", (4,), 0),)
    assert names.rows(fused, "x", 6, 2) == (
        StoredRows(0, 3, "experts.2.gate", (3, 2), 0),
        StoredRows(3, 6, "experts.2.up", (3, 2), 0),
    )
    assert names.rows(norm, "norm", 2, None) is None and names.rows(torch.zeros(1), "unknown", 1, None) is None
    with pytest.raises(UnsupportedError, match=r"^x has 5 rows in Megatron, experts\.0\.gate, experts\.0\.up have 6$"):
        names.rows(fused, "x", 5, 0)
