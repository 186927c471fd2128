"""Qwen3.5 and Qwen3-Next through Megatron-Bridge equal transformers on one rank, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import ConfigError, ModelOutput, PackedBatch, UnsupportedError
from rl_backend.runtime import check_config
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.engine import optimizer
from rl_backend.runtime.bridge.megatron.deltanet import require_deltanet_kernels
from tests.support.bridge_runs import bridge_config, open_bridge
from tests.support.bridge_state import exported, exported_gradients
from tests.support.families import pack, random_sequences, run_transformers
from tests.support.matrix import sampled
from tests.support.native import assert_equal_tensors, assert_near
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next

LENGTHS = (7, 1, 130, 33, 64, 65)
TEMPERATURE = 0.8
EPS = 1e-3
"""Of norms. What the first tokens of a sequence read from states may be near 0: a small one would magnify its rounding."""

MODELS: dict[str, Callable[..., Path]] = {
    "qwen3_5": write_qwen3_5,
    "qwen3_5, untied": partial(write_qwen3_5, tie_word_embeddings=False),
    "qwen3_5, layers in another order": partial(
        write_qwen3_5, layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"]
    ),
    "qwen3_5_moe": partial(write_qwen3_5, moe=True),
    "qwen3_next": write_qwen3_next,
    "qwen3_next, half of the features rotated": partial(
        write_qwen3_next, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "qwen3_5 as released": partial(write_qwen3_5, released=True),
    "qwen3_5_moe as released": partial(write_qwen3_5, released=True, moe=True),
}


class Expected(NamedTuple):
    """transformers', one sequence at a time: without its kernels it does not reset states where sequences meet."""

    output: ModelOutput
    gradients: dict[str, Tensor]


def expected_of(path: Path, sequences: list[Tensor]) -> Expected:
    """Gradients of the sum of all log-probs, under the names of the text model in a directory of its own."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    output = run_transformers(model, sequences, TEMPERATURE)
    assert output.log_probs is not None
    output.log_probs.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Expected(output, of_text_model(revert_weight_conversion(model, gradients)))


def of_text_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("language_model.", "", 1): tensor for name, tensor in tensors.items()}


def sum_of_log_probs(output: ModelOutput, *_: Any) -> tuple[Tensor, dict[str, Any]]:
    assert output.log_probs is not None
    return output.log_probs.sum(), {}


@pytest.mark.shows(
    "bridge: Qwen3.5, its mixture, both as released, and Qwen3-Next equal transformers to 1e-5, gradients too"
)
@pytest.mark.parametrize(
    "case", sampled(MODELS, "qwen3_5, layers in another order", "qwen3_next", "qwen3_5_moe as released")
)
def test_a_model_equals_transformers(case: str, tmp_path: Path) -> None:
    path = MODELS[case](tmp_path / "model", rms_norm_eps=EPS)
    sequences = random_sequences(LENGTHS)
    expected = expected_of(path, sequences)
    packed = pack(sequences)
    batch = PackedBatch(packed.input_ids, packed.seq_lens, meta={"temperature": TEMPERATURE, "calculate_entropy": True})
    with open_bridge(path) as runtime:
        handle = runtime.build_model()
        result = runtime.forward_backward(handle, [batch], sum_of_log_probs)
        gradients, weights = exported_gradients(runtime, handle), exported(runtime, handle)
        ok, norm, _ = runtime.optimizer_step(handle)
    for name in ("log_probs", "entropy"):
        found = torch.cat(list(result.output(name)))
        torch.testing.assert_close(found, getattr(expected.output, name).detach(), atol=1e-5, rtol=0)
    assert_near(of_text_model(gradients), expected.gradients)
    whole = torch.stack([gradient.double().norm() for gradient in expected.gradients.values()]).norm().item()
    assert ok
    assert norm == pytest.approx(whole, rel=1e-5)
    reader, beside = HFReader(path), ("model.visual.", "mtp.")
    assert_equal_tensors(weights, {name: reader.read(name) for name in reader.infos if not name.startswith(beside)})


@pytest.mark.parametrize("released", [True, False], ids=["released", "text model"])
def test_experts_that_lie_in_one_tensor_are_read_one_by_one(tmp_path: Path, released: bool) -> None:
    def weights(name: str, *, packed: bool) -> dict[str, Tensor]:
        path = write_qwen3_5(tmp_path / name, moe=True, layers=1, released=released, packed=packed)
        with open_bridge(path) as runtime:
            return exported(runtime, runtime.build_model(forward_only=True))

    assert_equal_tensors(weights("packed", packed=True), weights("single", packed=False))


def masters_have_their_sizes(path: Path) -> bool:
    with open_bridge(path, param_dtype="bfloat16") as runtime:
        trainer = runtime.build_model().optimizer
        assert trainer is not None
        states = optimizer.parameter_states(trainer.megatron)
        return all(state.tensors["param"].numel() == state.end - state.start for state in states)


def test_megatron_still_looks_for_parameters_of_two_dtypes_in_the_wrong_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_qwen3_5(tmp_path / "model")
    assert masters_have_their_sizes(path)
    monkeypatch.setattr(optimizer, "_count_in_adams_order", lambda megatron: None)
    assert not masters_have_their_sizes(path), "take _count_in_adams_order out"


REFUSED: dict[str, tuple[Callable[[Path], Path], dict[str, int], str]] = {
    "tp beyond the key heads": (
        partial(write_qwen3_5, linear_num_key_heads=1, linear_num_value_heads=4),
        {"tp": 2},
        "linear_num_key_heads=1",
    ),
    "tp beyond the key heads, as released": (
        partial(write_qwen3_5, released=True, linear_num_key_heads=1),
        {"tp": 2},
        "linear_num_key_heads=1",
    ),
    "tp and the shared expert": (
        partial(write_qwen3_5, moe=True, shared_expert_intermediate_size=33),
        {"tp": 2},
        "shared_expert_size=33",
    ),
    "cp": (write_qwen3_5, {"cp": 2}, "Megatron's own attention has no context parallelism"),
    "ep of a dense model": (write_qwen3_5, {"ep": 2}, "has no experts"),
    "pp": (partial(write_qwen3_5, layers=3), {"pp": 2}, "3 layers do not divide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_the_model_cannot_have_is_refused_before_anything_is_loaded(case: str, tmp_path: Path) -> None:
    write, layout, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check_config(bridge_config(write(tmp_path / "model"), layout), 2)


def test_weights_of_experts_that_do_not_add_up_to_one_are_refused(tmp_path: Path) -> None:
    path = write_qwen3_next(tmp_path / "model", norm_topk_prob=False)
    with open_bridge(path) as runtime, pytest.raises(UnsupportedError, match="norm_topk_prob=False"):
        runtime.build_model(forward_only=True)


class _Provider(NamedTuple):
    """The fields that are read."""

    experimental_attention_variant: str | None = "gated_delta_net"
    deterministic_mode: bool = False


def test_options_that_the_kernels_of_a_cuda_device_do_not_allow_are_named() -> None:
    cuda = torch.device("cuda", 0)
    require_deltanet_kernels(BridgeConfig(param_dtype="bfloat16"), _Provider(experimental_attention_variant=None), cuda)
    require_deltanet_kernels(BridgeConfig(), _Provider(), torch.device("cpu"))
    require_deltanet_kernels(BridgeConfig(param_dtype="bfloat16"), _Provider(), cuda)
    with pytest.raises(ConfigError, match=r"BridgeConfig\.param_dtype"):
        require_deltanet_kernels(BridgeConfig(param_dtype="float32"), _Provider(), cuda)
    with pytest.raises(ConfigError, match="deterministic_mode"):
        require_deltanet_kernels(BridgeConfig(param_dtype="bfloat16"), _Provider(deterministic_mode=True), cuda)
