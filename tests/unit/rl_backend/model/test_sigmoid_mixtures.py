"""Fields of mixtures whose routers score each expert by itself: groups, dense layers, the layer behind the others."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.model.families.reading import (
    after_dense_layers,
    read_decoder,
    read_sigmoid_mixture,
    swiglu_in_every_layer,
    with_draft_layer,
)
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.primitive.router import RouterSettings
from tests.unit.rl_backend.model.test_families_fields import config_of, refusal

SIGMOID: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 5}


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({}, {}, {"groups": 1, "chosen_groups": 1, "normalise": True, "scaling_factor": 1.0}),
        ({"norm_topk_prob": False}, {"default_scale": 2.5}, {"normalise": False, "scaling_factor": 2.5}),
        ({"routed_scaling_factor": 3}, {"default_scale": 2.5}, {"scaling_factor": 3.0, "normalise": True}),
        ({}, {"default_groups": (4, 2)}, {"groups": 4, "chosen_groups": 2}),
        ({"n_group": 2}, {"default_groups": (4, 2)}, {"groups": 2, "chosen_groups": 2}),
        ({"topk_group": 1}, {"default_groups": (4, 2)}, {"groups": 4, "chosen_groups": 1}),
        ({"topk_group": 1, "n_group": 1, "num_experts_per_tok": 8}, {}, {"top_k": 8, "groups": 1}),
        ({"n_shared_experts": 3}, {}, {"num_experts": 8, "top_k": 2, "score": "sigmoid", "expert_bias": True}),
    ],
)
def test_a_sigmoid_mixture_is_read(fields: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = read_sigmoid_mixture(config_of(**{**SIGMOID, **fields}), **options)
    assert {name: getattr(spec.router, name) for name in expected} == expected
    assert not spec.router.rounded_logits and not spec.router.bias and not spec.shared_gate
    assert (spec.intermediate_size, spec.shared_intermediate_size) == (5, 5 * fields.get("n_shared_experts", 1))
    assert spec.names.shared == "shared_experts"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 3}, "n_group=3: does not divide n_routed_experts=8"),
        ({"n_group": 8, "topk_group": 1}, "n_group=8: n_routed_experts=8 leave 1 in a group, whose two best are added up"),
        ({"n_group": 2, "topk_group": 3}, "topk_group=3: there are n_group=2"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok=3: topk_group=1 groups have 2 experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9: topk_group=1 groups have 8 experts"),
        ({"topk_method": "greedy"}, "topk_method='greedy': only 'noaux_tc' is implemented"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2: only 1 is implemented"),
        ({"n_shared_experts": 0}, "n_shared_experts=0: expected a positive whole number"),
    ],
)
def test_a_sigmoid_mixture_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    assert refusal(lambda: read_sigmoid_mixture(config_of(**{**SIGMOID, **fields}))) == message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0, 1, 1, 1]),
        ({"first_k_dense_replace": 0}, [1, 1, 1, 1]),
        ({"first_k_dense_replace": 2}, [0, 0, 1, 1]),
        ({"first_k_dense_replace": 9}, [0, 0, 0, 0]),
        ({"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, [1, 0, 0, 1]),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 2}, [0, 0, 1, 1]),
    ],
)
def test_dense_layers_come_first_or_where_they_are_named(fields: dict[str, Any], expected: list[int]) -> None:
    mixture = MoESpec(RouterSettings(4, 2), 8)
    found = after_dense_layers(config_of(**fields), mixture, default_dense=1)
    assert [int(block is mixture) for block in found] == expected
    assert all(block == SwiGLUSpec(40) for block in found if block is not mixture)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1: expected a number of layers"),
        ({"first_k_dense_replace": True}, "first_k_dense_replace=True: expected a number of layers"),
        (
            {"mlp_layer_types": ["dense"] * 3},
            "mlp_layer_types=['dense', 'dense', 'dense']: expected 'dense' or 'sparse' for",
        ),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types=['moe', 'moe', 'moe', 'moe']: expected 'dense' or"),
        ({"mlp_layer_types": ["sparse"] * 4, "first_k_dense_replace": 1}, "first_k_dense_replace=1: mlp_layer_types says ["),
    ],
)
def test_dense_layers_that_contradict_themselves_are_refused(fields: dict[str, Any], message: str) -> None:
    mixture = MoESpec(RouterSettings(4, 2), 8)
    assert refusal(lambda: after_dense_layers(config_of(**fields), mixture, default_dense=1)).startswith(message)


def test_a_draft_layer_has_the_last_layers_attention_and_the_mixture() -> None:
    mixture = MoESpec(RouterSettings(4, 2), 8)
    plain = config_of()
    decoder = read_decoder(plain, [1, 2, 3, 4], swiglu_in_every_layer(plain))
    for number in (None, 0):
        assert with_draft_layer(config_of(num_nextn_predict_layers=number), decoder, mixture) is decoder
    mtp = with_draft_layer(config_of(num_nextn_predict_layers=1), decoder, mixture).mtp
    assert mtp is not None and mtp.layer == (decoder.layers[-1].mixer, mixture) and not mtp.is_trained
    assert mtp.names.module == mtp.names.layer == "model.layers.4"
    assert refusal(lambda: with_draft_layer(config_of(num_nextn_predict_layers=2), decoder, mixture)).startswith("num_nextn")
