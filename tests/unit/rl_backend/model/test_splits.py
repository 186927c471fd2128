"""Which parts of each block are cut how over ranks, told by a stand-in of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rl_backend.contracts import ModelOptions, NativeConfig
from rl_backend.model import BuildSettings, decoder
from rl_backend.model.blocks import FeedForwardSpec, LayerNorms, MixerSpec
from rl_backend.model.decoder import Decoder
from rl_backend.model.feedforward import dense, moe
from rl_backend.model.feedforward.dense import MLPSpec, SwiGLUSpec
from rl_backend.model.feedforward.moe import MoE, MoESpec
from rl_backend.model.mixers import deltanet, gqa, mla
from rl_backend.model.mixers.deltanet import DeltaNetSpec, GatedDeltaNet
from rl_backend.model.mixers.gqa import GroupedQueryAttention
from rl_backend.model.mixers.mla import MLASpec
from rl_backend.primitive.attention import packed_attention
from rl_backend.primitive.experts import TokenShare
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import Rotary
from rl_backend.primitive.router import RouterSettings
from tests.unit.rl_backend.model.test_decoder_spec import ATTENTION, CHOOSES, FOLLOWS, MIXTURE, MTP, spec_of

CALLS: list[tuple[Any, ...]] = []


class Told:
    """Notes what a block asks of tensor parallelism."""

    def __init__(self, mesh: object) -> None:
        assert mesh == "tp mesh"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def note(*arguments: Any, **options: Any) -> str:
            CALLS.append((name, *arguments, *options.items()))
            return name

        return note


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (dense, moe, deltanet, gqa, mla, decoder):
        monkeypatch.setattr(module, "TensorParallel", Told)
    CALLS.clear()
    yield
    CALLS.clear()


def group(size: int, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def groups_of(tp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1, tp_rank: int = 0, ep_rank: int = 0) -> Any:
    return SimpleNamespace(
        tp_group=group(tp, tp_rank),
        cp_group=group(cp),
        token_group=group(tp * cp),
        expert_group=group(ep * etp),
        tp_mesh="tp mesh",
        ep_mesh=SimpleNamespace(get_local_rank=lambda dimension: (ep_rank, 77)[dimension]),
        parallel=SimpleNamespace(tp=tp, cp=cp, ep=ep, etp=etp),
        device=torch.device("cpu"),
    )


def said(root: nn.Module) -> list[str]:
    """``method module options``, of modules by their names in ``root``."""
    names = {id(module): name or "." for name, module in root.named_modules()}
    return [" ".join([call[0], *(names.get(id(each), str(each)) for each in call[1:])]) for call in CALLS]


LATENT: dict[str, Any] = {
    "num_heads": 2, "kv_rank": 5, "plain_dim": 6, "value_dim": 7, "rotary": Rotary(4, 1.0), "interleaved": True,
    "scale": 0.3, "latent_eps": 1e-6,
}  # fmt: skip
JOINT = replace(ATTENTION, num_kv_heads=2, qk_norm=True, joint_qk_norm=True)
MIXERS: dict[str, tuple[MixerSpec, list[str]]] = {
    "gqa": (
        replace(ATTENTION, num_heads=4, num_kv_heads=2),
        ["gather_input .", "column q_proj", "key_or_value k_proj 2", "key_or_value v_proj 2", "row o_proj"],
    ),
    "gqa, norms and sinks": (
        replace(ATTENTION, qk_norm=True, sinks=True),
        ["gather_input .", "column q_proj", "key_or_value k_proj 1", "key_or_value v_proj 1", "replicate q_norm",
         "replicate k_norm", "rows .", "row o_proj"],
    ),
    "gqa, norms over heads": (
        replace(JOINT, num_heads=4),
        ["gather_input .", "column q_proj", "key_or_value k_proj 2", "key_or_value v_proj 2", "norm_over_heads q_norm 4",
         "norm_over_heads k_norm 2", "row o_proj"],
    ),
    "mla": (
        MLASpec(query_rank=6, **LATENT),
        ["replicate_for_own_tokens q_a_proj", "replicate q_a_layernorm", "column q_b_proj",
         "replicate_for_own_tokens kv_a_proj_with_mqa", "replicate kv_a_layernorm", "column kv_b_proj", "row o_proj"],
    ),
    "mla, no latent of queries": (
        MLASpec(query_rank=None, **LATENT),
        ["column q_proj", "replicate_for_own_tokens kv_a_proj_with_mqa", "replicate kv_a_layernorm", "column kv_b_proj",
         "row o_proj"],
    ),
    "sparse": (
        CHOOSES,
        ["replicate_for_own_tokens q_a_proj", "replicate q_a_layernorm", "column q_b_proj",
         "replicate_for_own_tokens kv_a_proj_with_mqa", "replicate kv_a_layernorm", "column kv_b_proj", "row o_proj",
         *(f"replicate indexer.{part} ('partial', False)" for part in ("wq_b", "wk", "k_norm", "weights_proj"))],
    ),
    "sparse, follows": (
        FOLLOWS,
        ["replicate_for_own_tokens q_a_proj", "replicate q_a_layernorm", "column q_b_proj",
         "replicate_for_own_tokens kv_a_proj_with_mqa", "replicate kv_a_layernorm", "column kv_b_proj", "row o_proj"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXERS)
def test_attention_is_cut_by_heads(case: str) -> None:
    spec, expected = MIXERS[case]
    mixer = spec.build(8, NormSpec(1e-6))
    mixer.split(groups_of())
    assert CALLS == []
    mixer.split(groups_of(tp=2))
    assert said(mixer) == expected


@pytest.mark.parametrize("by_key_head", [False, True])
def test_a_recurrence_is_cut_by_heads_and_passes_states_along(by_key_head: bool) -> None:
    spec = DeltaNetSpec(num_key_heads=2, num_value_heads=4, key_dim=2, value_dim=3, by_key_head=by_key_head)
    mixer = spec.build(8, NormSpec(1e-6))
    assert isinstance(mixer, GatedDeltaNet)
    mixer.split(groups_of(tp=2))
    inputs = ("in_proj_qkvz", "in_proj_ba") if by_key_head else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    found = said(mixer)
    assert found[:-5] == ["gather_input .", *(f"column {name}" for name in inputs)]
    assert found[-5].startswith("replicate conv1d {'weight': ")
    assert found[-4:] == ["rows .", "rows decay", "replicate norm", "row out_proj"]
    assert (mixer.fused is None) is by_key_head and mixer.over_ranks is None
    mixer.split(groups_of(cp=3))
    assert mixer.over_ranks is not None and mixer.over_ranks.size == 3


def test_context_parallelism_is_told_apart_from_tensor_parallelism() -> None:
    attention = ATTENTION.build(8, NormSpec(1e-6))
    assert isinstance(attention, GroupedQueryAttention)
    attention.split(groups_of(tp=2))
    assert attention.attend is packed_attention
    groups = groups_of(cp=2)
    attention.split(groups)
    assert attention.attend.keywords == {"group": groups.cp_group}  # type: ignore[attr-defined]
    latent: Any = MLASpec(query_rank=6, **LATENT).build(8, NormSpec(1e-6))
    latent.split(groups)
    assert (latent._cp_group, latent._tensor) == (groups.cp_group, None)
    both = groups_of(tp=2, cp=2)
    latent.split(both)
    assert latent._cp_group == both.cp_group
    assert isinstance(latent._tensor, Told)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SwiGLUSpec(8), ["gather_input .", "column gate_proj", "column up_proj", "row down_proj"]),
        (MLPSpec(8, "relu"), ["gather_input .", "column up_proj", "row down_proj"]),
    ],
)
def test_dense_blocks_are_cut_by_features(spec: FeedForwardSpec, expected: list[str]) -> None:
    block = spec.build(8, ModelOptions())
    assert block.split(groups_of(cp=2)) == () and CALLS == []
    assert block.split(groups_of(tp=2)) == () and said(block) == expected


@pytest.mark.parametrize(
    ("sizes", "first", "share", "apart", "sums"),
    [
        ({}, 0, TokenShare(), False, False),
        ({"cp": 2}, 0, TokenShare(), False, True),
        ({"ep": 2, "ep_rank": 1}, 2, TokenShare(), True, False),
        ({"ep": 4, "ep_rank": 3}, 3, TokenShare(), True, False),
        ({"etp": 2}, 0, TokenShare(), True, False),
        ({"tp": 2, "tp_rank": 1}, 0, TokenShare(1, 1, 2), True, True),
        ({"tp": 4, "tp_rank": 3, "ep": 2}, 0, TokenShare(3, 1, 2), True, True),
        ({"tp": 2, "tp_rank": 1, "ep": 4, "ep_rank": 2}, 2, TokenShare(1, 0, 1), True, True),
        ({"tp": 3, "tp_rank": 2, "ep": 2, "ep_rank": 1}, 2, TokenShare(2, 1, 2), True, True),
    ],
)
def test_experts_are_spread_and_their_tokens_shared_out(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], first: int, share: TokenShare, apart: bool, sums: bool
) -> None:
    distributed: list[tuple[Any, ...]] = []
    monkeypatch.setattr(moe, "distribute_experts", lambda *arguments: distributed.append(arguments))
    router = RouterSettings(4, 2, expert_bias=True)
    block = MoESpec(router, 8, shared_intermediate_size=4, shared_gate=True).build(8, ModelOptions())
    assert isinstance(block, MoE)
    plain, groups = block.experts.dispatch, groups_of(**sizes)
    found = block.split(groups)
    assert list(found) == ([block.experts] if apart else [])
    assert (block.experts.first_expert, block.experts.share) == (first, share)
    assert (block.sum_over_ranks is not None) is sums
    spread = groups.expert_group.size() > 1
    assert (block.experts.dispatch is not plain) is spread
    assert distributed == ([(block.experts, groups.ep_mesh)] if spread else [])
    if spread:
        dispatch: Any = block.experts.dispatch
        assert (dispatch.ep_size, dispatch.etp_size) == (sizes.get("ep", 1), sizes.get("etp", 1))
        assert dispatch.num_experts == 4 and dispatch.group is groups.expert_group
    shared = [f"{call} shared_expert{part}" for call, part in (
        ("gather_input", ""), ("column", ".gate_proj"), ("column", ".up_proj"), ("row", ".down_proj"),
    )]  # fmt: skip
    expected = ["replicate gate", "replicate gate.expert_bias", *shared, "replicate_for_own_tokens shared_expert_gate"]
    assert said(block) == (expected if sizes.get("tp", 1) > 1 else [])


@pytest.mark.parametrize("head", ["log_probs", "values"])
@pytest.mark.parametrize("tied", [False, True])
def test_ends_are_cut_over_the_vocabulary_and_norms_stay_whole(
    monkeypatch: pytest.MonkeyPatch, head: Any, tied: bool
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(decoder, "apply_fsdp", lambda *arguments, **options: given.append((*arguments, options)))
    monkeypatch.setattr(decoder, "checkpoint_layers", lambda units, kept: given.append((kept, list(units))))
    monkeypatch.setattr(moe, "distribute_experts", lambda *_: None)
    layers = (spec_of().layers[0], spec_of().layers[0]._replace(feed_forward=MIXTURE))
    norms = LayerNorms("a", None, "c", "d")
    spec = spec_of(*layers, tie_word_embeddings=tied, norms=norms, mtp=replace(MTP, training="joint"))
    model = Decoder(spec, BuildSettings(ModelOptions(), head, 4))
    groups, config = groups_of(tp=2, ep=2), NativeConfig(device="cpu", activation_checkpointing="full")
    decoder.parallelize(model, groups, config)
    names = said(model)
    ends = [each for each in names if " layers." not in each and " mtp." not in each]
    expected = ["vocabulary embed_tokens", "replicate norm"]
    if head == "values":
        expected += ["gather_input score ('sum_gradients', False)", "replicate score ('partial', False)"]
    else:
        expected += [] if tied else ["split_rows lm_head"]
        expected += ["vocabulary_head 11"]
    assert ends == expected
    around = [each for each in names if each.split()[-1].rpartition(".")[2] in ("a", "c", "d")]
    own = [f"replicate mtp.layer.{norm}" for norm in "acd"] if head == "log_probs" else []
    assert around == [f"replicate layers.{layer}.{norm}" for layer in (0, 1) for norm in "acd"] + own
    of_mtp = ["replicate mtp.embedding_norm", "replicate mtp.hidden_norm", "replicate mtp.norm",
              "replicate_for_own_tokens mtp.projection"]  # fmt: skip
    assert [each for each in names if " mtp." in each and ".layer." not in each] == (of_mtp if own else [])
    units = [*model.each_layer(), *([model.mtp] if own else [])]
    experts = [layer.mlp.experts for layer in model.each_layer() if isinstance(layer.mlp, MoE)]
    assert given == [("full", units), (model, units, groups, config, {"experts": experts})]


def test_without_tensor_parallelism_nothing_is_cut_and_layers_are_units(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(decoder, "apply_fsdp", lambda *arguments, **options: given.append((*arguments, options)))
    model = Decoder(spec_of(spec_of().layers[0], spec_of().layers[0]), BuildSettings(ModelOptions(), "log_probs", 4))
    before = model.next_token_log_probs, model.values_of_tenants, [layer.forward for layer in model.each_layer()]
    groups, config = groups_of(cp=2), NativeConfig(device="cpu")
    decoder.parallelize(model, groups, config)
    assert CALLS == [] and given == [(model, list(model.each_layer()), groups, config, {"experts": []})]
    assert before == (model.next_token_log_probs, model.values_of_tenants, [layer.forward for layer in model.each_layer()])
