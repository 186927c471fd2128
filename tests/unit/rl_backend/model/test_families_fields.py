"""Fields of ``config.json`` that families share: windows, layers with experts, routers, heads, and their refusals."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.contracts import UnsupportedError
from rl_backend.model.families.reading import (
    full_attention,
    in_sparse_layers,
    read_activation,
    read_decoder,
    read_layer_types,
    read_router,
    swiglu_in_every_layer,
    window_of_every_layer,
    windows_by_layer_type,
)
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.router import RouterSettings

BASE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 100,
    "rope_theta": 10.0,
}
F, S = "full_attention", "sliding_attention"


def config_of(**fields: Any) -> HFConfig:
    return HFConfig({**BASE, **fields}, "some")


def refusal(call: Any) -> str:
    with pytest.raises(UnsupportedError) as refused:
        call()
    return str(refused.value).removeprefix("config.json: ").partition(" in the native some family")[0]


def test_layer_types_are_read_where_every_one_is_honoured() -> None:
    assert read_layer_types(config_of(), {F}) is None and read_layer_types(config_of(layer_types=None), {F}) is None
    assert read_layer_types(config_of(layer_types=[F, S, S, F]), {F, S}) == (F, S, S, F)
    for types, message in (
        ([F] * 3, f"layer_types={[F] * 3}: expected one for each of num_hidden_layers=4"),
        ([F] * 5, f"layer_types={[F] * 5}: expected one for each of num_hidden_layers=4"),
        ((F,) * 4, f"layer_types={(F,) * 4}: expected one for each of num_hidden_layers=4"),
        ({F: 1}, f"layer_types={ {F: 1} }: expected one for each of num_hidden_layers=4"),
        ([S, F, "x", 3], "layer_types=['3', 'x']: only 'full_attention' and 'sliding_attention' is implemented here"),
    ):
        assert refusal(lambda types=types: read_layer_types(config_of(layer_types=types), {S, F})) == message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 7}, (None,) * 4),
        ({"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 0}, (None,) * 4),
        ({"use_sliding_window": None, "layer_types": [F] * 4}, (None,) * 4),
        ({"sliding_window": 7, "use_sliding_window": True}, (None,) * 4),
        ({"sliding_window": 7, "use_sliding_window": True, "num_hidden_layers": 30}, (None,) * 28 + (7,) * 2),
        ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, (7,) * 4),
        ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 7)),
        (
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0, "layer_types": [S, F, F, S]},
            (7, None, None, 7),
        ),
    ],
)
def test_windows_of_qwen_are_switched_on_and_begin_at_a_layer(fields: dict[str, Any], expected: Any) -> None:
    assert windows_by_layer_type(config_of(**fields)) == expected


def test_windows_that_contradict_themselves_are_refused_by_field() -> None:
    on = {"use_sliding_window": True, "sliding_window": 7}
    for fields, message in (
        ({"layer_types": [F, F, F, S]}, f"layer_types={[F, F, F, S]}: sliding attention with use_sliding_window=false is"),
        ({**on, "sliding_window": None}, "sliding_window=None: expected a positive whole number"),
        ({**on, "max_window_layers": -1}, "max_window_layers=-1: expected a whole number of layers"),
        ({**on, "max_window_layers": True}, "max_window_layers=True: expected a whole number of layers"),
        ({**on, "max_window_layers": 1.0}, "max_window_layers=1.0: expected a whole number of layers"),
        ({"layer_types": ["x"] * 4}, "layer_types=['x']: only"),
    ):
        assert refusal(lambda fields=fields: windows_by_layer_type(config_of(**fields))).startswith(message)


@pytest.mark.parametrize(
    ("fields", "default", "expected"),
    [
        ({}, 9, 9),
        ({}, None, None),
        ({"sliding_window": None}, 9, None),
        ({"sliding_window": 3}, 9, 3),
        ({"sliding_window": 3}, None, 3),
        ({"sliding_window": 3, "layer_types": [S] * 4}, 9, 3),
        ({"sliding_window": None, "layer_types": [F] * 4}, 9, None),
    ],
)
def test_a_window_of_every_layer_is_the_field_or_the_default(fields: dict[str, Any], default: Any, expected: Any) -> None:
    assert window_of_every_layer(config_of(**fields), default) == (expected,) * 4


def test_a_window_of_every_layer_has_layers_of_one_kind() -> None:
    assert window_of_every_layer(config_of()) == (4096,) * 4
    for fields, message in (
        ({"sliding_window": 3, "layer_types": [F] * 4}, "layer_types=['full_attention']: only 'sliding_attention'"),
        ({"sliding_window": None, "layer_types": [F, S, F, F]}, "layer_types=['sliding_attention']: only 'full_attention'"),
        ({"sliding_window": 0}, "sliding_window=0: expected a positive whole number"),
    ):
        assert refusal(lambda fields=fields: window_of_every_layer(config_of(**fields))).startswith(message)


def test_a_family_without_windows_refuses_them() -> None:
    assert full_attention(config_of(layer_types=[F] * 4, use_sliding_window=False, sliding_window=None)) == (None,) * 4
    for fields, message in (
        ({"sliding_window": 5}, "sliding_window=5: it is not implemented"),
        ({"use_sliding_window": True}, "use_sliding_window=True: only False is implemented"),
        ({"layer_types": [F, F, S, F]}, "layer_types=['sliding_attention']: only 'full_attention' is implemented here"),
    ):
        assert refusal(lambda fields=fields: full_attention(config_of(**fields))) == message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": []}, [0, 0, 1, 0]),
        ({"decoder_sparse_step": 5}, [0, 0, 0, 0]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, [0, 0, 0, 1]),
    ],
)
def test_every_so_many_layers_have_experts_but_those_that_are_named(fields: dict[str, Any], expected: list[int]) -> None:
    mixture = MoESpec(RouterSettings(4, 2), 8)
    found = in_sparse_layers(config_of(**fields), mixture)
    assert [int(block is mixture) for block in found] == expected
    assert all(block == SwiGLUSpec(40) for block in found if block is not mixture)


@pytest.mark.parametrize("without", [[4], [-1], [True], ["1"], (1,), {}, 3, [0, None]])
def test_layers_without_experts_that_there_are_not_are_refused(without: Any) -> None:
    message = f"mlp_only_layers={without!r}: expected a list of layers from 0 to 3"
    assert refusal(lambda: in_sparse_layers(config_of(mlp_only_layers=without), MoESpec(RouterSettings(4, 2), 8))) == message


def test_a_router_has_the_number_of_experts_of_either_field() -> None:
    for fields in ({"num_experts": 6}, {"num_local_experts": 6}, {"num_experts": 6, "num_local_experts": 6}):
        for normalise in (True, False):
            expected = RouterSettings(6, 6, normalise=normalise)
            assert read_router(config_of(num_experts_per_tok=6, **fields), normalise=normalise) == expected
    refused: list[tuple[dict[str, Any], str]] = [
        ({"num_experts": 6, "num_local_experts": 5}, "num_local_experts=5: num_experts is 6"),
        ({"num_experts": 1}, "num_experts_per_tok=2: there are 1 experts"),
        ({}, "num_experts=None: expected a positive whole number"),
        ({"num_local_experts": 0}, "num_local_experts=0: expected a positive whole number"),
        ({"num_experts": 4, "num_experts_per_tok": None}, "num_experts_per_tok=None: expected a positive whole number"),
    ]
    for changes, message in refused:
        whole = config_of(**{"num_experts_per_tok": 2, **changes})
        assert refusal(lambda whole=whole: read_router(whole, normalise=True)) == message


def test_an_activation_is_one_by_name() -> None:
    assert read_activation(config_of(), "gelu_new") == "gelu_tanh"
    assert read_activation(config_of(hidden_act="swish"), "gelu_new") == "silu"
    for name in ("tanh", ["relu"], 3):
        assert refusal(lambda name=name: read_activation(config_of(hidden_act=name), "relu")) == (
            f"hidden_act={name!r}: expected one of silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu, relu2"
        )


def attention(fields: dict[str, Any], **options: Any) -> GQASpec:
    config = config_of(**fields)
    mixer = read_decoder(config, [None] * 4, swiglu_in_every_layer(config), **options).layers[0].mixer
    assert isinstance(mixer, GQASpec)
    return mixer


@pytest.mark.parametrize(
    ("fields", "options", "heads"),
    [
        ({}, {}, (6, 6, 4)),
        ({"num_key_value_heads": 2}, {"default_kv_heads": 3}, (6, 2, 4)),
        ({}, {"default_kv_heads": 3}, (6, 3, 4)),
        # Null is as many as there are queries, whatever the default.
        ({"num_key_value_heads": None}, {"default_kv_heads": 3}, (6, 6, 4)),
        ({"head_dim": 10}, {"default_head_dim": 8}, (6, 6, 10)),
        ({"head_dim": None}, {"default_head_dim": 8}, (6, 6, 8)),
        ({"hidden_size": 25, "head_dim": 10}, {}, (6, 6, 10)),
        ({"hidden_size": 25}, {"default_head_dim": 8}, (6, 6, 8)),
    ],
)
def test_heads_are_read_with_the_defaults_of_a_family(
    fields: dict[str, Any], options: dict[str, Any], heads: tuple[int, int, int]
) -> None:
    found = attention(fields, **options)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == heads and found.rotary.head_dim == heads[2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads=4: does not divide num_attention_heads=6"),
        ({"num_key_value_heads": 12}, "num_key_value_heads=12: does not divide num_attention_heads=6"),
        ({"hidden_size": 25}, "hidden_size=25: without head_dim, num_attention_heads=6 must divide it"),
        ({"hidden_act": "relu"}, "hidden_act='relu': only 'silu' is implemented"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: only 0 or 0.0 is implemented"),
        ({"pretraining_tp": 2}, "pretraining_tp=2: only 1 is implemented"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: expected a positive, finite number"),
        ({"vocab_size": None}, "vocab_size=None: expected a positive whole number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': expected true or false"),
    ],
)
def test_a_decoder_that_cannot_be_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    assert refusal(lambda: attention(fields)) == message


def test_the_rest_of_a_decoder_is_read_and_windows_that_hide_nothing_are_dropped() -> None:
    config = config_of(rms_norm_eps=0.25, tie_word_embeddings=True)
    blocks = [SwiGLUSpec(size) for size in (1, 2, 3, 4)]
    decoder = read_decoder(config, [None, 99, 100, 101], blocks, qkv_bias=True, scale=0.5)
    windows = [layer.mixer.window for layer in decoder.layers if isinstance(layer.mixer, GQASpec)]
    assert windows == [None, 99, None, None] and [layer.feed_forward for layer in decoder.layers] == blocks
    assert (decoder.vocab_size, decoder.hidden_size, decoder.max_length) == (50, 24, 100)
    assert decoder.norm == NormSpec(0.25) and decoder.tie_word_embeddings
    plain = read_decoder(config_of(), [None] * 4, blocks, default_tied=True, norm=NormSpec(0.5, "layer"))
    assert plain.norm == NormSpec(0.5, "layer") and plain.tie_word_embeddings
    assert read_decoder(config_of(), [None] * 4, blocks).norm == NormSpec(1e-6)
    assert not read_decoder(config_of(tie_word_embeddings=None), [None] * 4, blocks, default_tied=True).tie_word_embeddings
    assert not read_decoder(config_of(), [None] * 4, blocks).tie_word_embeddings
    assert attention({"hidden_act": "relu"}, activations=("silu", "relu")).window is None
