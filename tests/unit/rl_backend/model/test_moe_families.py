"""Families with mixtures of experts against transformers': log-probs, gradients, names, saving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.checkpoint.hf_weights import load_weights
from rl_backend.contracts import (
    CheckpointError,
    ConfigError,
    Head,
    OptimizerConfig,
    PackedWeight,
    UnsupportedError,
    WeightName,
)
from rl_backend.model import MIXTRAL, QWEN3_MOE, find_model
from rl_backend.model.feedforward.moe import MoE, MoESpec
from rl_backend.model.options import DecoderOptions
from rl_backend.primitive.router import load_balancing_loss, router_z_loss
from tests.support.critic import transformers_values, write_critic
from tests.support.families import load_native, load_transformers, random_sequences, run_native, run_transformers
from tests.support.moe import MODELS, gradients_in_transformers_names, unpacked, write_moe
from tests.support.native import assert_equal_tensors, gradients, micro_batches, open_runtime, token_loss

LENGTHS = (7, 1, 100, 33, 33, 60)
HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize("model", MODELS)
def test_tokens_may_go_to_one_expert_or_to_all(model: str, tmp_path: Path) -> None:
    config = read_hf_config(write_moe(model, tmp_path / "model"))
    if "topk_group" in config:
        config |= {"topk_group": config["n_group"]}
    numbers = {config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(name)}
    family = find_model("auto", config)
    for chosen in (1, *numbers):
        decoder = family.parse_config({**config, "num_experts_per_tok": chosen})
        blocks = [layer.feed_forward for layer in decoder.layers]
        assert {block.router.top_k for block in blocks if isinstance(block, MoESpec)} == {chosen}
    with pytest.raises(UnsupportedError, match="num_experts_per_tok"):
        family.parse_config({**config, "num_experts_per_tok": max(numbers) + 1})


@pytest.mark.shows("model: Qwen3-MoE, Mixtral, GLM-4.5 and MiniMax-M2 equal transformers' log-probs and gradients to 1e-5")
@pytest.mark.parametrize("model", MODELS)
def test_log_probs_and_gradients_equal_transformers(tmp_path: Path, model: str) -> None:
    path = write_moe(model, tmp_path / "model")
    sequences = random_sequences(LENGTHS)
    mix = torch.randn(2, sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    native, reference = load_native(path), load_transformers(path)
    outputs = [run_native(native, sequences, 0.8), run_transformers(reference, sequences, 0.8)]
    torch.testing.assert_close(outputs[0].log_probs, outputs[1].log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs[0].entropy, outputs[1].entropy, atol=1e-5, rtol=0)
    for output in outputs:
        ((output.log_probs * mix[0]).sum() + (output.entropy * mix[1]).sum()).backward()
    found, expected = gradients_in_transformers_names(native), dict(reference.named_parameters())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = float(expected[name].grad.abs().max())
        torch.testing.assert_close(
            gradient, expected[name].grad, atol=1e-5 * scale, rtol=0, msg=lambda message, name=name: f"{name}: {message}"
        )


def test_an_expert_without_tokens_has_a_gradient_of_zeros(tmp_path: Path) -> None:
    native = load_native(write_moe("qwen3_moe, experts without tokens", tmp_path / "model"))
    run_native(native, random_sequences((20,))).log_probs.sum().backward()
    experts = native.get_submodule("layers.0.mlp.experts")
    for parameter in experts.parameters():
        unused = parameter.grad.flatten(1).abs().sum(1) == 0
        assert parameter.grad.shape == parameter.shape and 44 <= int(unused.sum()) < 64


@pytest.mark.shows("model: mixtures of experts are trained, saved in Hugging Face tensors and loaded by transformers")
@pytest.mark.parametrize("model", ["qwen3_moe, dense layers between", "mixtral", "glm4_moe", "minimax_m2"])
def test_a_trained_model_is_saved_for_transformers_with_the_same_log_probs(tmp_path: Path, model: str) -> None:
    path = write_moe(model, tmp_path / "model")
    with open_runtime(path) as runtime:
        handle = runtime.build_model()
        data = micro_batches([[0, 1, 2, 3], [4, 5, 6, 7]])
        losses = []
        for _ in range(4):
            runtime.zero_grad(handle)
            losses.append(runtime.forward_backward(handle, data, token_loss).loss)
            assert runtime.optimizer_step(handle).ok
        assert losses == sorted(losses, reverse=True)
        runtime.save_checkpoint(handle, tmp_path / "saved", hf=True)
        exported = dict(runtime.export_weights(handle))
    stored = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        stored.update(load_file(file))
    assert stored.keys() == exported.keys()
    sequences = random_sequences((60, 9))
    with torch.no_grad():
        native = run_native(load_native(tmp_path / "saved"), sequences)
        reference = run_transformers(load_transformers(tmp_path / "saved"), sequences)
    torch.testing.assert_close(native.log_probs, reference.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_critics_equal_transformers_before_and_after_saving(tmp_path: Path, model: str) -> None:
    path = write_critic(tmp_path / "critic", write_moe(model, tmp_path / "model"))
    sequences = random_sequences((60, 9))
    with torch.no_grad():
        values = run_native(load_native(path, head="values"), sequences).values
    torch.testing.assert_close(values, transformers_values(path, sequences), atol=1e-5, rtol=0)
    with open_runtime(path) as runtime:
        runtime.save_checkpoint(runtime.build_model(head="values"), tmp_path / "saved", hf=True)
    assert torch.equal(transformers_values(tmp_path / "saved", sequences), transformers_values(path, sequences))


def test_exported_gradients_and_activations_have_hugging_face_names(tmp_path: Path) -> None:
    with open_runtime(write_moe("qwen3_moe, dense layers between", tmp_path / "model")) as runtime:
        handle = runtime.build_model()
        data = micro_batches([[0, 1, 2]])
        runtime.forward_backward(handle, data, token_loss)
        exported = dict(runtime.export_gradients(handle))
        held = unpacked(handle.weight_names, gradients(handle))
        assert list(exported) == list(held) == [info.name for info in runtime.weight_infos(handle)]
        assert all(torch.equal(tensor, held[name]) for name, tensor in exported.items())
        (activations,) = runtime.activations(handle, data)
    assert {"model.layers.1.mlp", "model.layers.1.mlp.experts", "model.layers.0.mlp"} <= activations.keys()


def test_router_losses_of_the_options_are_averaged_over_micro_batches(tmp_path: Path) -> None:
    path = write_moe("qwen3_moe, dense layers between", tmp_path / "model", num_hidden_layers=2, mlp_only_layers=[])
    options = DecoderOptions(router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
    split = [[0, 1, 2], [3], [4, 5]]
    found = []
    recomputed = {"model": "qwen3_moe", "model_cfg": options, "activation_checkpointing": "full"}
    for settings in ({}, {"model": "qwen3_moe", "model_cfg": options}, recomputed):
        with open_runtime(path, **settings) as runtime:
            handle = runtime.build_model()
            losses = runtime.forward_backward(handle, micro_batches(split), token_loss).losses
            found.append((losses, gradients(handle)))
    assert found[0][0] == found[1][0] == found[2][0]
    assert_equal_tensors(found[1][1], found[2][1])
    model = load_native(path)
    mixture = model.get_submodule("layers.1.mlp")
    assert isinstance(mixture, MoE)
    routings: list[Any] = []
    mixture.gate.register_forward_hook(lambda *call: routings.append(call[-1]))
    for batch in micro_batches(split):
        run_native(model, batch.split(batch.input_ids))
    expected = sum(
        0.5 * load_balancing_loss(routing, mixture.gate.settings) + 0.1 * router_z_loss(routing.logits)
        for routing in routings
    )
    assert isinstance(expected, torch.Tensor)
    (expected / len(split)).backward()
    for name, parameter in model.named_parameters():
        added = found[1][1][name] - found[0][1][name]
        if parameter.grad is None:
            assert not added.any(), name
        else:
            torch.testing.assert_close(added, parameter.grad, atol=2e-6, rtol=1e-3, msg=name)


def test_bfloat16_computes_mixtures_close_to_float32(tmp_path: Path) -> None:
    path = write_moe("qwen3_moe", tmp_path / "model")
    found = []
    for settings in ({}, {"param_dtype": "bfloat16"}):
        with open_runtime(path, optimizer=OptimizerConfig(lr=1e-3), **settings) as runtime:
            handle = runtime.build_model()
            loss = runtime.forward_backward(handle, micro_batches([[0, 1, 2, 3, 4, 5, 6, 7]]), token_loss).loss
            assert all(gradient.dtype == torch.float32 for gradient in gradients(handle).values())
            assert runtime.optimizer_step(handle).ok
            found.append(loss)
    assert found[1] == pytest.approx(found[0], rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9: there are 8 experts"),
        ({"num_experts": None}, "num_experts=None"),
        ({"num_local_experts": 4}, "num_local_experts=4: num_experts is 8"),
        ({"mlp_only_layers": [4]}, r"mlp_only_layers=\[4\]"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_qwen3_moe_cannot_honour_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    assert QWEN3_MOE.parse_config(HF_CONFIG).sparse == (True,) * 4
    with pytest.raises(UnsupportedError, match=message):
        QWEN3_MOE.parse_config({**HF_CONFIG, **changes})


def test_layers_are_sparse_as_in_transformers() -> None:
    config = {**HF_CONFIG, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert QWEN3_MOE.parse_config(config).sparse == (False, True, False, False, False, True)


def test_mixtral_with_noise_in_its_router_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"router_jitter_noise=0\.1"):
        MIXTRAL.parse_config({**HF_CONFIG, "router_jitter_noise": 0.1})


def test_negative_or_unknown_options_are_refused() -> None:
    for options in ({"router_aux_loss_coef": -1.0}, {"router_z_loss_coef": float("nan")}, {"aux_loss": 1.0}):
        with pytest.raises(ConfigError):
            DecoderOptions(**options)


def test_a_missing_or_surplus_expert_is_named_before_anything_is_read(tmp_path: Path) -> None:
    path = write_moe("qwen3_moe", tmp_path / "model", max_shard_size="1GB")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    for change, message in (
        ({name: None}, f"no tensor {name}"),
        ({name.replace("3.up", "4.up"): torch.zeros(1)}, "experts.4.up_proj.weight"),
        ({name: torch.zeros(3, 64)}, r"of shape \(3, 64\)"),
    ):
        broken = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        save_file(broken, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            load_native(path)


def test_names_that_do_not_fit_their_packed_parameter_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_names(architecture: Any, head: Head) -> Mapping[str, WeightName]:
        names = dict(QWEN3_MOE.weight_names(architecture, head))
        packed = names["layers.0.mlp.experts.gate_up_proj"]
        assert isinstance(packed, PackedWeight)
        return {**names, "layers.0.mlp.experts.gate_up_proj": PackedWeight((2, 4), packed.names)}

    family = replace(QWEN3_MOE, weight_names=wrong_names)
    monkeypatch.setattr("rl_backend.runtime.native.layout.find_model", lambda *_: family)
    message = r"packs \(2, 4\) tensors into layers.0.mlp.experts.gate_up_proj"
    with open_runtime(write_moe("qwen3_moe", tmp_path)) as runtime, pytest.raises(UnsupportedError, match=message):
        runtime.build_model()


def test_a_packed_weight_is_read_from_its_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    parameter = nn.Parameter(torch.empty(2, 3))
    load_weights(tmp_path, {"both": parameter}, {"both": PackedWeight((2,), ("a", "b"))})
    assert parameter.tolist() == [[0.0] * 3, [1.0] * 3]
