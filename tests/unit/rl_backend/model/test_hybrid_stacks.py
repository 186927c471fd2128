"""Decoders whose layers are of different kinds, and a kind of block that this package does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import (
    MODEL_CONFIGS,
    ConfigError,
    ParallelConfig,
    RoutedLayers,
    UnsupportedError,
    WeightName,
)
from rl_backend.lab.plan.bridge import LocalLayers
from rl_backend.lab.plan.memory import Workload
from rl_backend.model import MODEL_FAMILIES, BuildSettings, ModelInput, ModelStage, register_model
from rl_backend.model.blocks import LayerSpec, Mixer, MixerSpec, Rotation, linear_names
from rl_backend.model.decoder import Decoder, decoder_family
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.norm import NormSpec
from rl_backend.runtime.bridge.config import BridgeConfig
from tests.support.families import load_native, random_sequences, run_native
from tests.support.hybrid import HYBRID, WINDOW, read, write_hybrid
from tests.support.native import gradients, micro_batches, open_runtime, token_loss

LENGTHS = (7, 1, 40, 23)


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return write_hybrid(tmp_path / "hybrid")


def spec_of(path: Path) -> DecoderSpec:
    spec = HYBRID.parse_config(read_hf_config(path))
    assert isinstance(spec, DecoderSpec)
    return spec


def test_a_specification_names_the_blocks_of_each_layer(hybrid: Path) -> None:
    spec = spec_of(hybrid)
    assert spec.sparse == (False, True, False, True)
    assert spec.routed_layers == RoutedLayers(4, 2, spec.sparse)
    names = set(HYBRID.weight_names(spec, "log_probs"))
    assert {"layers.0.self_attn.q_proj.bias", "layers.0.mlp.up_proj.bias", "layers.1.self_attn.q_norm.weight"} <= names
    assert {"layers.1.mlp.experts.down_proj", "layers.1.mlp.gate.weight"} <= names
    assert not {"layers.0.self_attn.q_norm.weight", "layers.1.self_attn.q_proj.bias", "layers.0.mlp.gate.weight"} & names
    assert names == {name for name, _ in load_native(hybrid).named_parameters()}


def test_routers_that_differ_have_no_routes_to_record(hybrid: Path) -> None:
    spec = spec_of(hybrid)
    mixture: Any = spec.layers[1].feed_forward
    other = spec.layers[3]._replace(feed_forward=replace(mixture, router=replace(mixture.router, num_experts=8)))
    assert replace(spec, layers=(*spec.layers[:3], other)).routed_layers is None
    assert replace(spec, layers=spec.layers[::2]).routed_layers is None


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 8}, "does not divide num_attention_heads=4"),
        ({"ep": 3}, "does not divide num_experts=4"),
        ({"etp": 3}, "does not divide moe_intermediate_size=32"),
    ],
    ids=str,
)
def test_every_kind_of_block_refuses_what_does_not_divide_it(hybrid: Path, sizes: dict[str, int], message: str) -> None:
    spec = spec_of(hybrid)
    with pytest.raises(ConfigError, match=message):
        spec.check_layout(ParallelConfig(**sizes))
    spec.check_layout(ParallelConfig(tp=2, ep=4, etp=2))
    with pytest.raises(ConfigError, match="does not divide intermediate_size=130"):
        HYBRID.parse_config({**read_hf_config(hybrid), "intermediate_size": 130}).check_layout(ParallelConfig(tp=4))


@pytest.mark.shows("model: one stack mixes layers of different kinds: windows, rotary embeddings, mixtures, dense blocks")
def test_a_stack_computes_what_stacks_of_one_kind_compute_one_after_the_other(hybrid: Path) -> None:
    model, sequences = load_native(hybrid), random_sequences(LENGTHS)
    assert isinstance(model, Decoder)
    with torch.no_grad():
        expected = run_native(model, sequences).log_probs
    seen = []

    class Chain(nn.Module):
        """Each layer as a stage of a model all of whose layers are of its kind."""

        def forward(self, inputs: ModelInput) -> Any:
            output: Any = None
            for index, layer in enumerate(model.spec.layers):
                alike = replace(model.spec, layers=(layer,) * model.spec.num_layers)
                stage = ModelStage(index == 0, range(index, index + 1), index == model.spec.num_layers - 1)
                part = Decoder(alike, BuildSettings(DecoderOptions(), "log_probs", 16, stage))
                weights = {name.replace("tied_head", "embed_tokens"): name for name in part.state_dict()}
                whole = model.state_dict()
                part.load_state_dict({name: whole[original] for original, name in weights.items()})
                output = part(inputs._replace(hidden=output))
                seen.append(layer)
            return output

    with torch.no_grad():
        assert torch.equal(run_native(Chain(), sequences).log_probs, expected)
    assert seen == list(model.spec.layers) and len(set(seen)) == 2


def test_only_layers_with_a_window_forget(hybrid: Path) -> None:
    """Through one layer a token sees as far as that layer's window."""
    spec = spec_of(hybrid)
    for layers, sees_all in ((spec.layers[:1], False), (spec.layers[1:2], True)):
        model = Decoder(replace(spec, layers=layers), BuildSettings(DecoderOptions(), "log_probs", 16))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        tokens = torch.arange(40)
        changed = tokens.index_fill(0, torch.tensor([38 - WINDOW]), 100)
        with torch.no_grad():
            found = [run_native(model, [sequence]).log_probs[38] for sequence in (tokens, changed)]
        assert torch.equal(*found) is not sees_all


def test_it_trains_and_is_saved_and_recomputes_the_same(hybrid: Path, tmp_path: Path) -> None:
    data = micro_batches([[0, 1, 2], [3, 4, 5]])
    curves = []
    for settings in ({}, {"activation_checkpointing": "full"}):
        with open_runtime(hybrid, **settings) as runtime:
            handle = runtime.build_model()
            losses = []
            for _ in range(3):
                runtime.zero_grad(handle)
                losses.append(runtime.forward_backward(handle, data, token_loss).loss)
                assert all(bool(gradient.any()) for gradient in gradients(handle).values())
                assert runtime.optimizer_step(handle).ok
            recorded = runtime.forward_backward(handle, data, None, forward_only=True, router_replay="record")
            assert recorded.outputs["routed_experts"][0].shape[1:] == (2, 2)
            runtime.save_checkpoint(handle, tmp_path / f"saved{len(curves)}", hf=True)
            exported = dict(runtime.export_weights(handle))
            curves.append(losses)
    assert curves[0] == curves[1] and curves[0] == sorted(curves[0], reverse=True)
    stored = load_file(tmp_path / "saved0" / "model.safetensors")
    assert stored.keys() == exported.keys() == load_file(hybrid / "model.safetensors").keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in exported.items())


def test_a_plan_of_the_bridge_refuses_several_kinds_of_attention(hybrid: Path) -> None:
    spec = spec_of(hybrid)
    options, workload = BridgeConfig(device="cpu"), Workload(sequence_length=8, micro_batch_tokens=8)
    for layers in (spec.layers, (LayerSpec(RunningMeanSpec(), spec.layers[0].feed_forward),)):
        with pytest.raises(UnsupportedError, match=r"layers of .*Spec: a plan knows what Megatron keeps of one kind"):
            LocalLayers(replace(spec, layers=layers), options, workload)
    attention = spec.layers[0].mixer
    assert isinstance(attention, GQASpec)
    alike = tuple(spec.layers[0]._replace(mixer=replace(attention, window=window)) for window in (None, 12))
    assert LocalLayers(replace(spec, layers=alike), options, workload).scores == 4 * 8**2 * 4


@dataclass(frozen=True)
class RunningMeanSpec(MixerSpec):
    """A kind of mixer that one file adds: no rotary embedding, names of its own."""

    rotary = None

    def build(self, hidden_size: int, norm: NormSpec) -> RunningMean:
        return RunningMean(hidden_size)

    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        return linear_names(("in_proj",), f"{layer}.running_mean", bias=False)

    def check_layout(self, parallel: ParallelConfig) -> None:
        if parallel.tp > 1 or parallel.cp > 1:
            raise ConfigError.of("ParallelConfig.tp", parallel.tp, "a running mean has neither tp nor cp; use 1")


class RunningMean(Mixer):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        assert rotation is None
        means = []
        for sequence in self.in_proj(x).split(list(segments.query_lens)):
            means.append(sequence.cumsum(0) / torch.arange(1, len(sequence) + 1)[:, None])
        return torch.cat(means)

    def split(self, groups: ParallelGroups) -> None:
        pass


def with_running_means(config: HFConfig) -> DecoderSpec:
    decoder = read(config)
    layers = [LayerSpec(RunningMeanSpec(), layer.feed_forward) for layer in decoder.layers[::2]]
    return replace(decoder, layers=(layers[0], decoder.layers[1], layers[1], decoder.layers[3]))


@pytest.mark.shows("extending: a new kind of mixer is one file beside a family that names it")
def test_a_mixer_from_outside_trains_beside_attention(hybrid: Path, tmp_path: Path) -> None:
    family = decoder_family("running_means", with_running_means)
    register_model(family)
    try:
        weights = load_file(hybrid / "model.safetensors")
        attention = [name for name in weights if "layers.0.self_attn" in name or "layers.2.self_attn" in name]
        kept = {name: tensor for name, tensor in weights.items() if name not in attention}
        new = {f"model.layers.{layer}.running_mean.in_proj.weight": torch.eye(64) for layer in (0, 2)}
        save_file({**kept, **new}, hybrid / "model.safetensors", metadata={"format": "pt"})
        with open_runtime(hybrid, model="running_means") as runtime:
            handle = runtime.build_model()
            data, losses = micro_batches([[0, 1, 2, 3]]), []
            for _ in range(3):
                runtime.zero_grad(handle)
                losses.append(runtime.forward_backward(handle, data, token_loss).loss)
                assert runtime.optimizer_step(handle).ok
            assert losses == sorted(losses, reverse=True)
            exported = dict(runtime.export_weights(handle))
        assert exported.keys() == {**kept, **new}.keys()
        with pytest.raises(ConfigError, match="a running mean has neither tp nor cp"):
            family.parse_config(read_hf_config(hybrid)).check_layout(ParallelConfig(tp=2))
    finally:
        MODEL_FAMILIES.remove("running_means")
        MODEL_CONFIGS.remove("running_means")
