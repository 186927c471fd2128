"""Qwen3.5, dense and as a mixture, and Qwen3-Next against transformers'; what their directories say and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_backend.contracts import ConfigError, ParallelConfig, UnsupportedError
from rl_backend.model import find_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.mixers.deltanet import DeltaNetSpec
from rl_backend.model.mixers.gqa import GQASpec
from tests.support.families import (
    assert_equal_packed_and_alone,
    load_native,
    load_transformers,
    random_sequences,
    run_native,
    run_transformers,
)
from tests.support.matrix import sampled
from tests.support.native import full, micro_batches, open_runtime, relative_difference, token_loss, train
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next

LENGTHS = (7, 1, 64, 65, 130)
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3_5": write_qwen3_5,
    "qwen3_5_moe": lambda path: write_qwen3_5(path, moe=True),
    "qwen3_next": write_qwen3_next,
    "qwen3_next, dense layers between": lambda path: write_qwen3_next(path, decoder_sparse_step=2, norm_topk_prob=False),
    "qwen3_5, wide values, a wider convolution": lambda path: write_qwen3_5(
        path, linear_num_value_heads=6, linear_value_head_dim=32, linear_conv_kernel_dim=6, tie_word_embeddings=False
    ),
}


@pytest.mark.shows("model: Qwen3.5, dense and mixture, and Qwen3-Next equal transformers' log-probs and gradients to 1e-5")
@pytest.mark.parametrize(
    "model",
    sampled(MODELS, "qwen3_5_moe", "qwen3_next, dense layers between", "qwen3_5, wide values, a wider convolution"),
)
def test_log_probs_and_gradients_equal_transformers_packed_and_alone(tmp_path: Path, model: str) -> None:
    path = MODELS[model](tmp_path / "model")
    assert_equal_packed_and_alone(path, LENGTHS)


@pytest.mark.parametrize("kind", [{}, {"moe": True}, {"moe": True, "packed": True}], ids=["dense", "mixture", "packed"])
def test_a_released_directory_computes_what_its_language_model_does_in_transformers(
    tmp_path: Path, kind: dict[str, bool]
) -> None:
    path = write_qwen3_5(tmp_path / "model", released=True, **kind)
    sequences = random_sequences((33, 1, 70))
    # transformers drops the vision tower and the layer for multi-token prediction.
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        found, expected = run_native(load_native(path), sequences), run_transformers(reference, sequences)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("field", ["norm_topk_prob", "decoder_sparse_step"])
def test_what_a_directory_of_qwen3_next_does_not_say_is_as_in_transformers(tmp_path: Path, field: str) -> None:
    path = write_qwen3_next(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    del config[field]
    (path / "config.json").write_text(json.dumps(config))
    sequences = random_sequences((19, 6))
    with torch.no_grad():
        found, expected = (
            run_native(load_native(path), sequences),
            run_transformers(load_transformers(path), sequences),
        )
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", [pytest.param("qwen3_5", marks=pytest.mark.long), "qwen3_5_moe"])
def test_a_trained_model_is_saved_for_transformers_with_the_same_log_probs(tmp_path: Path, model: str) -> None:
    path = MODELS[model](tmp_path / "model")
    with open_runtime(path) as runtime:
        handle = runtime.build_model()
        losses = [loss for loss, _ in train(runtime, handle, 3)]
        assert len(set(losses)) == 3
        runtime.save_checkpoint(handle, tmp_path / "saved", hf=True)
    sequences = random_sequences((60, 9))
    with torch.no_grad():
        native = run_native(load_native(tmp_path / "saved"), sequences)
        reference = run_transformers(load_transformers(tmp_path / "saved"), sequences)
    torch.testing.assert_close(native.log_probs, reference.log_probs, atol=1e-5, rtol=0)


@pytest.mark.shows("model: nothing of a packed sequence reaches its neighbours in Qwen3.5, forward or backward")
def test_a_packed_sequence_changes_nothing_of_its_neighbours(tmp_path: Path) -> None:
    native = load_native(write_qwen3_5(tmp_path / "model"))
    first, second, third = random_sequences((40, 70, 33))
    outputs = []
    for between in (second, second.flip(0)):
        native.zero_grad()
        log_probs = run_native(native, [first, between, third]).log_probs
        assert log_probs is not None
        torch.cat((log_probs[:40], log_probs[110:])).sum().backward()
        gradients = {
            name: parameter.grad.clone() for name, parameter in native.named_parameters() if parameter.grad is not None
        }
        outputs.append((log_probs[:40].detach(), log_probs[110:].detach(), gradients))
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    for name, gradient in outputs[0][2].items():
        assert relative_difference(outputs[1][2][name], gradient) < 1e-6, name


@pytest.mark.shows("model: Qwen3.5 in bfloat16 keeps A_log, decays and states in float32")
@pytest.mark.parametrize("forward_only", [False, True])
def test_decays_are_float32_in_a_bfloat16_model(tmp_path: Path, forward_only: bool) -> None:
    path = write_qwen3_5(tmp_path / "model")
    seen: list[Tensor] = []
    with open_runtime(path, param_dtype="bfloat16") as runtime:
        handle = runtime.build_model(forward_only=forward_only)
        stored = dict(load_transformers(path).named_parameters())["model.layers.1.linear_attn.A_log"]
        mixer = handle.model.get_submodule("layers.1.linear_attn")
        mixer.get_submodule("decay").register_forward_pre_hook(
            lambda module, _: seen.append(next(module.parameters()).detach().clone())
        )
        mixer.get_submodule("decay").register_forward_hook(lambda _, __, output: seen.append(output.detach()))
        mixer.get_submodule("out_proj").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        runtime.forward_backward(handle, micro_batches([[0, 1, 2]]), token_loss, forward_only=forward_only)
    a_log, decay, output = seen[:3]
    assert a_log.dtype == decay.dtype == torch.float32 and torch.equal(full(a_log), stored)
    assert not torch.equal(stored, stored.bfloat16().float())
    assert output.dtype == torch.bfloat16


HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "max_position_embeddings": 128,
    "mamba_ssm_dtype": "float32",
}
MIXTURE: dict[str, Any] = {
    **HF_CONFIG,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25}


def parse(config: dict[str, Any]) -> DecoderSpec:
    spec = find_model("auto", config).parse_config(config)
    assert isinstance(spec, DecoderSpec)
    return spec


def test_what_a_directory_does_not_say_is_as_in_transformers() -> None:
    spec = parse(HF_CONFIG)
    kinds = [type(layer.mixer) for layer in spec.layers]
    assert kinds == ([DeltaNetSpec] * 3 + [GQASpec]) * 2
    attention, linear = spec.layers[3].mixer, spec.layers[0].mixer
    assert isinstance(attention, GQASpec) and isinstance(linear, DeltaNetSpec)
    assert attention.head_dim == 256 and attention.rotary.head_dim == 64 and attention.output_gate and attention.qk_norm
    assert (linear.key_dim, linear.value_dim, linear.conv_width, linear.by_key_head) == (128, 128, 4, False)
    assert spec.norm.from_one and not spec.tie_word_embeddings and spec.prefix == "model"
    assert [type(layer.mixer) for layer in parse({**HF_CONFIG, "full_attention_interval": 2}).layers][:2] == [
        DeltaNetSpec,
        GQASpec,
    ]
    sections = {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [22, 21, 21], "mrope_interleaved": True}
    (rotary,) = {layer.mixer.rotary for layer in parse({**HF_CONFIG, "rope_parameters": sections}).layers[3::4]}
    assert rotary is not None and (rotary.head_dim, rotary.theta) == (128, 1e7)


def test_a_nested_model_has_the_names_of_released_files() -> None:
    text = {name: value for name, value in HF_CONFIG.items() if name != "model_type"}
    config = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True, "vision_config": {}}
    spec = parse(config)
    assert spec.tie_word_embeddings
    names = spec.weight_names("log_probs")
    assert names["layers.0.linear_attn.decay.A_log"] == "model.language_model.layers.0.linear_attn.A_log"
    assert names["norm.weight"] == "model.language_model.norm.weight" and "lm_head.weight" not in names
    with pytest.raises(UnsupportedError, match="tie_word_embeddings=True: text_config says False"):
        parse({**config, "text_config": {**text, "tie_word_embeddings": False}})
    with pytest.raises(UnsupportedError, match="text_config=7: expected an object"):
        parse({**config, "text_config": 7})


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (HF_CONFIG, {"linear_num_value_heads": 6}, "linear_num_value_heads=6: linear_num_key_heads=4 must divide it"),
        (
            HF_CONFIG,
            {"layer_types": ["sliding_attention"] * 8},
            "layer_types=.*only 'full_attention' and 'linear_attention'",
        ),
        (HF_CONFIG, {"attn_output_gate": False}, "attn_output_gate=False"),
        (HF_CONFIG, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        (HF_CONFIG, {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        (HF_CONFIG, {"attention_bias": True}, "attention_bias=True"),
        (HF_CONFIG, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (HF_CONFIG, {"full_attention_interval": 0}, "full_attention_interval=0"),
        (
            HF_CONFIG,
            {"partial_rotary_factor": 0.5, "rope_parameters": SCALED},
            "partial_rotary_factor=0.5: rope_parameters says 0.25; make them the same",
        ),
        (MIXTURE, {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        (MIXTURE, {"norm_topk_prob": False}, "norm_topk_prob=False"),
        (MIXTURE, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size=None"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    parse(config)
    with pytest.raises(UnsupportedError, match=message):
        parse({**config, **changes})


def test_layouts_that_do_not_divide_are_refused_with_arithmetic() -> None:
    parse(HF_CONFIG).check_layout(ParallelConfig(tp=4, cp=8, pp=2))
    spec = parse({**HF_CONFIG, "num_attention_heads": 8, "linear_num_value_heads": 8})
    with pytest.raises(ConfigError, match=r"tp=8: does not divide linear_num_key_heads=4 \(4 / 8 = 0.50\); use 4"):
        spec.check_layout(ParallelConfig(tp=8))
    with pytest.raises(ConfigError, match="tp=16: does not divide shared_expert_intermediate_size=24"):
        parse({**MIXTURE, "num_attention_heads": 16, "linear_num_key_heads": 16, "linear_num_value_heads": 16}).check_layout(
            ParallelConfig(tp=16)
        )


def test_a_mixture_has_routers_as_in_transformers() -> None:
    (block,) = {layer.feed_forward for layer in parse(MIXTURE).layers}
    assert isinstance(block, MoESpec) and block.router.normalise and block.router.rounded_logits
    assert (block.shared_intermediate_size, block.shared_gate) == (24, True)


def test_a_kernel_that_cannot_run_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    options = {"model": "qwen3_5", "model_cfg": {"delta_kernel": "fla"}}
    path = write_qwen3_5(tmp_path / "model")
    # Weights of another model, which loading would refuse.
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 2 * config["vocab_size"]}))
    with open_runtime(path, **options) as runtime, pytest.raises(ConfigError, match=r"delta_kernel='fla': .*use 'torch'"):
        runtime.build_model()
