"""A decoder as a value: names, what its layers say together, stages, options, layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_backend.contracts import (
    ConfigError,
    CopiedWeight,
    IndexedLayers,
    ModelOptions,
    ParallelConfig,
    RoutedLayers,
)
from rl_backend.model import BuildSettings, ModelStage
from rl_backend.model.blocks import CacheBytes, LayerNorms, LayerSpec
from rl_backend.model.decoder import Decoder
from rl_backend.model.decoder_spec import DecoderSpec, MTPNames, MTPSpec
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.mixers.deltanet import DeltaNetSpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.mixers.mla import ChosenKeysSpec, IndexerSpec, MLASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import Rotary
from rl_backend.primitive.router import RouterSettings

ATTENTION = GQASpec(num_heads=2, num_kv_heads=1, head_dim=4, rotary=Rotary(4, 10.0))
LINEAR = DeltaNetSpec(num_key_heads=2, num_value_heads=2, key_dim=4, value_dim=4)
DENSE, MIXTURE = SwiGLUSpec(8), MoESpec(RouterSettings(4, 2), 8)
KEYS = ChosenKeysSpec(indexer=IndexerSpec(num_heads=2, head_dim=6, rotated=4, interleaved=True), top_k=3)
CHOOSES = MLASpec(
    num_heads=2,
    query_rank=6,
    kv_rank=5,
    plain_dim=4,
    value_dim=4,
    rotary=Rotary(4, 10.0),
    interleaved=True,
    scale=0.3,
    latent_eps=1e-6,
    keys=KEYS,
)
FOLLOWS = replace(CHOOSES, keys=replace(KEYS, indexer=None))


def spec_of(*layers: LayerSpec, **changes: Any) -> DecoderSpec:
    fields: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 8,
        "max_length": 32,
        "norm": NormSpec(1e-6),
        "tie_word_embeddings": False,
        "layers": layers or (LayerSpec(ATTENTION, DENSE), LayerSpec(LINEAR, MIXTURE)),
    }
    return DecoderSpec(**{**fields, **changes})


MTP = MTPSpec(LayerSpec(ATTENTION, DENSE), MTPNames.after_layers("model", 2))
NAMES = MTPNames("mtp", "mtp.layers.0", "pre_e", "pre_h", "fc", "last", embedding="", head="own.weight")


def stored(spec: DecoderSpec, head: Any = "log_probs") -> dict[str, Any]:
    return {name: value for name, value in spec.weight_names(head).items() if ".mlp." not in name and "_attn." not in name}


def parameters(spec: DecoderSpec, head: Any, options: ModelOptions | None = None) -> set[str]:
    return {name for name, _ in Decoder(spec, BuildSettings(options or ModelOptions(), head, 4)).named_parameters()}


@pytest.mark.parametrize(
    ("changes", "head", "expected"),
    [
        ({}, "log_probs", {"norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}),
        ({"tie_word_embeddings": True}, "log_probs", {"norm.weight": "model.norm.weight"}),
        (
            {"head_bias": True, "final_norm": "last", "prefix": "a.b"},
            "log_probs",
            {"norm.weight": "a.b.last.weight", "lm_head.weight": "lm_head.weight", "lm_head.bias": "lm_head.bias"},
        ),
        (
            {"head_bias": True, "norm": NormSpec(1e-5, "layer", bias=True)},
            "values",
            {
                "norm.weight": "model.norm.weight",
                "norm.bias": "model.norm.bias",
                "score.weight": "score.weight",
                "score.bias": "score.bias",
            },
        ),
        (
            {"tie_word_embeddings": True, "mtp": replace(MTP, training="joint")},
            "values",
            {"norm.weight": "model.norm.weight", "score.weight": "score.weight", "score.bias": "score.bias"},
        ),
    ],
    ids=str,
)
def test_ends_have_these_names(changes: dict[str, Any], head: Any, expected: dict[str, str]) -> None:
    spec = spec_of(**changes)
    prefix = spec.prefix
    norms = {
        f"layers.{layer}.{norm}.{name}": f"{prefix}.layers.{layer}.{norm}.{name}"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
        for name in spec.norm.parameters
    }
    assert stored(spec, head) == {"embed_tokens.weight": f"{prefix}.embed_tokens.weight", **norms, **expected}
    assert set(spec.weight_names(head)) == parameters(spec, head)


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        (LayerNorms("a", "b", "c", "d"), ["a", "self_attn", "b", "c", "mlp", "d"]),
        (LayerNorms(None, "b", None, "d"), ["self_attn", "b", "mlp", "d"]),
        (LayerNorms("a", None, None, None), ["a", "self_attn", "mlp"]),
    ],
)
def test_norms_of_a_layer_lie_around_its_blocks_in_order(norms: LayerNorms, expected: list[str]) -> None:
    spec = spec_of(norms=norms)
    names = [name.split(".")[2] for name in spec.weight_names("log_probs") if name.startswith("layers.0.")]
    assert list(dict.fromkeys(names)) == expected
    model = Decoder(spec, BuildSettings(ModelOptions(), "log_probs", 4))
    first = next(model.each_layer())
    assert [name for name, _ in first.named_children()] == expected
    assert [
        norm is first.get_submodule(name) for norm, name in zip(first.each_norm(), filter(None, norms), strict=True)
    ] == [True] * len(list(filter(None, norms)))


def test_what_layers_say_together() -> None:
    spec = spec_of()
    assert (spec.num_layers, spec.sparse) == (2, (False, True))
    assert spec.routed_layers == RoutedLayers(4, 2, (False, True)) and spec.indexed_layers is None
    other = LayerSpec(ATTENTION, MoESpec(RouterSettings(4, 1), 8))
    assert spec_of(*spec.layers, other).routed_layers is None, "routers differ"
    assert spec_of(spec.layers[0]).routed_layers is None
    # Routers that differ in nothing that routes are recorded of.
    alike = LayerSpec(ATTENTION, MoESpec(RouterSettings(4, 2, normalise=True), 6))
    assert spec_of(*spec.layers, alike).routed_layers == RoutedLayers(4, 2, (False, True, True))
    full, shared = LayerSpec(CHOOSES, DENSE), LayerSpec(FOLLOWS, DENSE)
    assert spec_of(full, shared, full).indexed_layers == IndexedLayers(3, (0, 2))
    assert spec_of(full, LayerSpec(replace(CHOOSES, keys=replace(KEYS, top_k=4)), DENSE)).indexed_layers is None
    warm = LayerSpec(replace(CHOOSES, keys=replace(KEYS, training="warm_up")), DENSE)
    assert spec_of(warm, warm).indexed_layers is None
    model = Decoder(spec_of(full, shared, full), BuildSettings(ModelOptions(), "log_probs", 4))
    assert [(layer.key_place, layer.place, layer.chooses) for layer in model.each_layer()] == [
        (0, None, True),
        (None, None, True),
        (1, None, True),
    ]
    places = Decoder(spec_of(*spec.layers, spec.layers[0], alike), BuildSettings(ModelOptions(), "log_probs", 4))
    assert [layer.place for layer in places.each_layer()] == [None, 0, None, 1]


def test_bytes_of_a_sequence_are_added_up_where_every_layer_knows_them() -> None:
    spec = spec_of()
    linear = LINEAR.cache_bytes(0, 2).state
    assert spec.cache_bytes(10, 2) == CacheBytes(10 * 2 * 4 * 2, linear)
    assert spec_of(*spec.layers, *spec.layers).cache_bytes(10, 2) == CacheBytes(2 * 10 * 2 * 4 * 2, 2 * linear)

    class Silent(GQASpec):
        def cache_bytes(self, num_tokens: int, itemsize: int) -> Any:
            return None

    silent = Silent(num_heads=2, num_kv_heads=1, head_dim=4, rotary=Rotary(4, 10.0))
    assert spec_of(spec.layers[0], LayerSpec(silent, DENSE)).cache_bytes(10, 2) is None


def test_a_stage_begins_with_a_layer_that_follows_no_other() -> None:
    full, shared = LayerSpec(CHOOSES, DENSE), LayerSpec(FOLLOWS, DENSE)
    spec = spec_of(full, shared, shared, full, shared)
    for layers in (range(3), range(3, 5), range(5), range(3, 4), range(1, 1)):
        spec.require_stage(layers)
    with pytest.raises(ConfigError, match=r"pipeline_layers=2: .*begin with layers of \[0, 3\]"):
        spec.require_stage(range(2, 4))
    with pytest.raises(ConfigError, match="pipeline_layers=1"):
        Decoder(spec, BuildSettings(ModelOptions(), "log_probs", 4, ModelStage(False, range(1, 3), False)))


def test_options_of_multi_token_prediction_change_what_is_trained() -> None:
    spec = spec_of(mtp=MTP)
    assert spec.configured(ModelOptions()) is spec and spec.configured(DecoderOptions()) is spec
    joint = spec.configured(DecoderOptions(mtp="joint", mtp_loss_weight=0.7))
    assert joint.mtp == replace(MTP, training="joint", loss_weight=0.7) and joint.mtp.is_trained
    assert not MTP.is_trained and replace(joint, mtp=MTP) == spec
    detached = spec.configured(DecoderOptions(mtp="detached"))
    assert detached.mtp is not None and (detached.mtp.training, detached.mtp.loss_weight) == ("detached", 0.1)
    assert spec_of().configured(DecoderOptions()) == spec_of()
    with pytest.raises(
        ConfigError,
        match=r"model_cfg\.mtp='detached': config.json describes no part that takes it; it takes delta_kernel, freeze",
    ):
        spec_of().configured(DecoderOptions(mtp="detached"))
    assert spec.kept_prefixes() == joint.kept_prefixes() == ("model.layers.2.",) and spec_of().kept_prefixes() == ()


@pytest.mark.parametrize("tied", [False, True])
def test_names_of_a_trained_layer_for_multi_token_prediction(tied: bool) -> None:
    spec = spec_of(mtp=replace(MTP, training="joint"), tie_word_embeddings=tied)
    names = spec.weight_names("log_probs")
    embedding, head = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"
    assert names["embed_tokens.weight"] == CopiedWeight(
        "model.embed_tokens.weight", (embedding, head) if tied else (embedding,)
    )
    assert names.get("lm_head.weight") == (None if tied else CopiedWeight("lm_head.weight", (head,)))
    own = {name.removeprefix("mtp."): value for name, value in names.items() if name.startswith("mtp.")}
    assert own["projection.weight"] == "model.layers.2.eh_proj.weight"
    assert own["embedding_norm.weight"] == "model.layers.2.enorm.weight"
    assert own["hidden_norm.weight"] == "model.layers.2.hnorm.weight"
    assert own["norm.weight"] == "model.layers.2.shared_head.norm.weight"
    assert own["layer.self_attn.q_proj.weight"] == "model.layers.2.self_attn.q_proj.weight"
    assert set(names) == parameters(spec, "log_probs")
    assert "mtp.norm.weight" not in spec_of(mtp=MTP).weight_names("log_probs")


def test_other_names_and_norms_of_that_layer() -> None:
    mtp = MTPSpec(LayerSpec(ATTENTION, DENSE), NAMES, "detached")
    spec = spec_of(mtp=mtp, norm=NormSpec(1e-5, "layer", bias=True))
    names = spec.weight_names("log_probs")
    assert names["embed_tokens.weight"] == "model.embed_tokens.weight", "there is no copy"
    assert names["lm_head.weight"] == CopiedWeight("lm_head.weight", ("mtp.own.weight",))
    assert mtp.copies(tied=True) == {"embed_tokens.weight": ("mtp.own.weight",)}
    assert {name: value for name, value in names.items() if name.startswith("mtp.") and ".layer." not in name} == {
        "mtp.projection.weight": "mtp.fc.weight",
        "mtp.embedding_norm.weight": "mtp.pre_e.weight",
        "mtp.embedding_norm.bias": "mtp.pre_e.bias",
        "mtp.hidden_norm.weight": "mtp.pre_h.weight",
        "mtp.hidden_norm.bias": "mtp.pre_h.bias",
        "mtp.norm.weight": "mtp.last.weight",
        "mtp.norm.bias": "mtp.last.bias",
    }
    assert names["mtp.layer.mlp.up_proj.weight"] == "mtp.layers.0.mlp.up_proj.weight"
    assert spec.kept_prefixes() == ("mtp.",)


def test_layouts_are_checked_block_by_block_and_experts_need_a_mixture() -> None:
    spec_of().check_layout(ParallelConfig(tp=2, ep=4, etp=2, cp=3))
    with pytest.raises(ConfigError, match="ep=3: does not divide num_experts=4"):
        spec_of().check_layout(ParallelConfig(ep=3))
    dense = spec_of(LayerSpec(ATTENTION, DENSE))
    dense.check_layout(ParallelConfig(tp=2))
    for name in ("ep", "etp"):
        with pytest.raises(ConfigError, match=rf"ParallelConfig\.{name}=2: this model has no experts; use 1"):
            dense.check_layout(ParallelConfig(**{name: 2}))
    # A layer for multi-token prediction counts where it is trained.
    odd = MTPSpec(LayerSpec(ATTENTION, SwiGLUSpec(9)), MTP.names)
    spec_of(mtp=odd).check_layout(ParallelConfig(tp=2))
    with pytest.raises(ConfigError, match="tp=2: does not divide intermediate_size=9"):
        spec_of(mtp=replace(odd, training="joint")).check_layout(ParallelConfig(tp=2))
    last = spec_of(*spec_of().layers, LayerSpec(ATTENTION, SwiGLUSpec(9)))
    with pytest.raises(ConfigError, match="tp=2: does not divide intermediate_size=9"):
        last.check_layout(ParallelConfig(tp=2))


def test_a_bias_of_a_head_that_is_the_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"DecoderSpec\.head_bias=True: embeddings have none"):
        spec_of(head_bias=True, tie_word_embeddings=True)


def test_what_keeps_prefixes_from_being_shared_is_said() -> None:
    class Alone(GQASpec):
        @property
        def shares_prefixes(self) -> bool:
            return False

    fields: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "rotary": Rotary(4, 10.0)}
    assert spec_of().why_unshared(None) == spec_of().why_unshared(DecoderOptions()) == ""
    kinds = [type(name, (Alone,), {}) for name in "DBEAC"]
    layers = [LayerSpec(mixer, DENSE) for mixer in (ATTENTION, *(kind(**fields) for kind in (*kinds, *kinds)))]
    assert spec_of(*layers).why_unshared(None) == "A, B, C, D, E"
    kernel = DecoderOptions(delta_kernel="fla")
    assert spec_of().why_unshared(kernel) == "model_cfg.delta_kernel='fla'"
    assert spec_of(*layers).why_unshared(kernel) == "A, B, C, D, E, model_cfg.delta_kernel='fla'"
