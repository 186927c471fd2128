"""Layers of Megatron beside which adapters work: which they are, and what tenants cannot have."""

from __future__ import annotations

import rl_backend.runtime.bridge.engine  # noqa: F401 - imports Megatron in the order that it needs

# isort: split

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

from rl_backend.contracts import ConfigError
from rl_backend.lora.modules import AdaptedModule
from rl_backend.primitive.adapters import Columns
from rl_backend.runtime.adaptable import COUPLES, TRAINS_BASE
from rl_backend.runtime.bridge.model.adapters import (
    _modules_of,
    _refused_by,
    _tied_head,
    attach_adapters,
)
from rl_backend.runtime.bridge.model.conversion import Conversion
from rl_backend.runtime.bridge.model.output_heads import CriticOutputLayer


def group(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def mixture(**changes: Any) -> Any:
    settings = {
        "num_moe_experts": 8,
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_expert_capacity_factor": None,
        "moe_router_load_balancing_type": "none",
    }
    return SimpleNamespace(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ""),
        ({"moe_aux_loss_coeff": [0.0, 0.0], "moe_z_loss_coeff": 0.0}, ""),
        ({"num_moe_experts": None, "moe_aux_loss_coeff": 0.1}, ""),
        ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff=0.1"),
        ({"moe_aux_loss_coeff": [0.0, 0.1]}, "moe_aux_loss_coeff=[0.0, 0.1]"),
        ({"moe_z_loss_coeff": 0.2, "moe_expert_capacity_factor": 1.0}, "moe_z_loss_coeff=0.2"),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor=0.0"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn'"),
        ({"moe_router_load_balancing_type": "aux_loss"}, ""),
    ],
    ids=str,
)
def test_what_couples_tenants_or_trains_their_base_is_named(changes: dict[str, Any], named: str) -> None:
    expected = f"BridgeConfig.override_transformer_config {named}: {COUPLES}" if named else ""
    assert _refused_by(mixture(**changes), 0.0) == expected
    assert _refused_by(mixture(**changes), 0.5) == f"BridgeConfig.expert_bias_rate=0.5: {TRAINS_BASE}"


@pytest.mark.parametrize(
    ("field", "value", "tp", "needed"),
    [
        ("sequence_parallel", True, 1, False),
        ("sequence_parallel", False, 2, True),
        ("softmax_type", "learnable", 1, "'vanilla'"),
        ("attention_dropout", 0.1, 2, 0.0),
    ],
)
def test_settings_that_tenants_cannot_have_are_refused(field: str, value: Any, tp: int, needed: Any) -> None:
    config = SimpleNamespace(sequence_parallel=tp > 1, softmax_type="vanilla", attention_dropout=0.0)
    setattr(config, field, value)
    groups: Any = SimpleNamespace(pg=SimpleNamespace(tp=group(0, tp)))
    message = rf"\['{field}'\]={value!r}: LoRA tenants need {needed} here; leave it out$"
    with pytest.raises(ConfigError, match=message):
        attach_adapters([], [], config, groups, 0.0)


def layer(kind: type, **fields: Any) -> Any:
    made = object.__new__(kind)
    nn.Module.__init__(made)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def described(name: str, mapping: Any, shapes: dict[str, tuple[int, ...]], module: Any, rows: int, **task: Any) -> Any:
    """The modules of the layer, for the second of two tensor-parallel ranks and the third of four for experts."""
    conversion = Conversion((), shapes, torch.float32, True)
    config = SimpleNamespace(num_query_groups=4)
    groups: Any = SimpleNamespace(pg=SimpleNamespace(tp=group(1, 2), expt_tp=group(2, 4)))
    settings = {
        "global_param_name": name,
        "param_name": name,
        "megatron_module": module,
        "mapping": mapping,
        "param_weight": torch.zeros(rows, 1),
        **task,
    }
    return dict(_modules_of(SimpleNamespace(**settings), conversion, config, groups))


COLUMN, ROW = layer(ColumnParallelLinear), layer(RowParallelLinear)


def test_embedding_and_head_have_the_words_of_a_rank_without_padding() -> None:
    shapes = {"embed.weight": (11, 6), "lm_head.weight": (11, 6)}
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    embed, head = AutoMapping(names[0], "embed.weight"), AutoMapping(names[1], "lm_head.weight")
    # Twelve rows with the padding: this rank has the last five words.
    assert described(names[0], embed, shapes, "module", 6) == {
        AdaptedModule("embed", "embedding", 11, 6, (6, 11), (0, 6)): None
    }
    assert described(names[1], head, shapes, "module", 6) == {AdaptedModule("lm_head", "head", 6, 11, (0, 6), (6, 11)): None}
    assert described(names[0], embed, shapes, "module", 5) == {
        AdaptedModule("embed", "embedding", 11, 6, (5, 10), (0, 6)): None
    }


def test_a_head_that_is_the_embedding_is_a_module_of_the_chunk_that_makes_logits() -> None:
    conversion = Conversion((), {"embed.weight": (11, 6)}, torch.float32, True)

    def chunk(rows: int, *, makes_logits: bool = True, output_layer: Any = None) -> Any:
        weight = partial(torch.zeros, rows, 6)
        return SimpleNamespace(
            post_process=makes_logits, output_layer=output_layer, shared_embedding_or_output_weight=weight
        )

    assert _tied_head(chunk(6), conversion, group(1, 2)) == AdaptedModule("lm_head", "head", 6, 11, (0, 6), (6, 11))
    assert _tied_head(chunk(6, makes_logits=False), conversion, group(1, 2)) is None
    assert _tied_head(chunk(6, output_layer=object.__new__(CriticOutputLayer)), conversion, group(1, 2)) is None


def test_linear_layers_have_the_modules_that_they_fuse_and_a_ranks_part_of_them() -> None:
    block = "decoder.layers.3"
    row = AutoMapping(f"{block}.mlp.linear_fc2.weight", "down.weight")
    assert described(f"{block}.mlp.linear_fc2.weight", row, {"down.weight": (6, 10)}, ROW, 6) == {
        AdaptedModule("down", "feed_forward", 10, 6, (5, 10), (0, 6)): None
    }
    shared = f"{block}.mlp.shared_experts.linear_fc1.weight"
    gated = GatedMLPMapping(shared, "gate.weight", "up.weight")
    assert described(shared, gated, {"gate.weight": (8, 6), "up.weight": (8, 6)}, COLUMN, 8) == {
        AdaptedModule("gate", "feed_forward", 6, 8, (0, 6), (4, 8)): Columns(1, 0, 4),
        AdaptedModule("up", "feed_forward", 6, 8, (0, 6), (4, 8)): Columns(1, 4, 8),
    }
    qkv = QKVMapping(f"{block}.self_attention.linear_qkv.weight", "q.weight", "k.weight", "v.weight")
    shapes = {"q.weight": (24, 6), "k.weight": (12, 6), "v.weight": (8, 6)}
    # Of the rank's two groups each has six rows of queries, three of keys and two of values.
    assert described(f"{block}.self_attention.linear_qkv.weight", qkv, shapes, COLUMN, 22) == {
        AdaptedModule("q", "attention", 6, 24, (0, 6), (12, 24)): Columns(2, 0, 6),
        AdaptedModule("k", "attention", 6, 12, (0, 6), (6, 12)): Columns(2, 6, 9),
        AdaptedModule("v", "attention", 6, 8, (0, 6), (4, 8)): Columns(2, 9, 11),
    }
    alone = AutoMapping(f"{block}.self_attention.linear_q_down_proj.weight", "q_a.weight")
    assert described(f"{block}.self_attention.linear_q_down_proj.weight", alone, {"q_a.weight": (8, 6)}, COLUMN, 4) == {
        AdaptedModule("q_a", "attention", 6, 8, (0, 6), (4, 8)): None
    }


def test_experts_are_cut_over_the_ranks_of_experts() -> None:
    name = "decoder.layers.3.mlp.experts.local_experts.1.linear_fc{}.weight"
    down = AutoMapping(name.format(2), "experts.1.down.weight")
    assert described(name.format(2), down, {"experts.1.down.weight": (6, 16)}, ROW, 6) == {
        AdaptedModule("experts.1.down", "experts", 16, 6, (8, 12), (0, 6), is_expert=True): None
    }
    up = GatedMLPMapping(name.format(1), "gate.weight", "up.weight")
    assert described(name.format(1), up, {"gate.weight": (16, 6), "up.weight": (16, 6)}, COLUMN, 8) == {
        AdaptedModule("gate", "experts", 6, 16, (0, 6), (8, 12), is_expert=True): Columns(1, 0, 4),
        AdaptedModule("up", "experts", 6, 16, (0, 6), (8, 12), is_expert=True): Columns(1, 4, 8),
    }


def test_what_is_no_layer_of_this_rank_has_no_adapters() -> None:
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    mapping, shapes = AutoMapping(name, "down.weight"), {"down.weight": (6, 10)}
    assert not described(name, mapping, shapes, ROW, 6, param_weight=None)
    assert not described(name, mapping, shapes, ROW, 6, param_name=name.replace("weight", "bias"))
    assert not described("decoder.layers.3.mlp.router.weight", mapping, shapes, ROW, 6)
    assert not described(name, mapping, shapes, nn.Linear(2, 2), 6)
    stacked = SimpleNamespace(hf_param="down.weight", is_grouped_export=True, is_expert=False)
    assert not described(name, stacked, shapes, ROW, 6)
