"""The native runtime's atoms on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_backend.algorithm import sft_loss
from rl_backend.contracts import MetricValue, ModelOutput, OptimizerConfig, PackedBatch, TokenSequence
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from tests.gpu.conftest import MakeRuntime
from tests.support.sft_batches import random_token_sequences, sft_micro_batches

pytestmark = pytest.mark.gpu


def train(runtime: NativeRuntime, handle: NativeHandle, data: list[PackedBatch], steps: int) -> list[float]:
    """The loss before each of ``steps`` steps."""
    losses = []
    with runtime.train_mode(handle):
        for _ in range(steps):
            runtime.zero_grad(handle)
            losses.append(runtime.forward_backward(handle, data, sft_loss).loss)
            assert runtime.optimizer_step(handle).ok
            runtime.lr_scheduler_step(handle)
    return losses


def weights(runtime: NativeRuntime, handle: NativeHandle) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in runtime.export_weights(handle)}


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation_checkpointing", ["none", "selective", "full"])
def test_training_loss_falls(
    untied_model: Path,
    make_runtime: MakeRuntime,
    param_dtype: Literal["float32", "bfloat16"],
    activation_checkpointing: Literal["none", "selective", "full"],
) -> None:
    runtime = make_runtime(untied_model, param_dtype=param_dtype, activation_checkpointing=activation_checkpointing)
    handle = runtime.build_model()
    losses = train(runtime, handle, sft_micro_batches(random_token_sequences((40, 12, 65, 7), 128), size=2), steps=30)
    assert losses[-1] < 0.7 * losses[0]


def test_gradients_do_not_depend_on_the_split_into_micro_batches(untied_model: Path, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(untied_model)
    sequences = random_token_sequences((40, 12, 65, 7), 128)
    norms = []
    for size in (4, 1):
        handle = runtime.build_model()
        runtime.forward_backward(handle, sft_micro_batches(sequences, size), sft_loss)
        norms.append(runtime.optimizer_step(handle).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.parametrize(("param_dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_a_prompt_that_samples_share_trains_as_whole_sequences(
    untied_model: Path, make_runtime: MakeRuntime, param_dtype: str, tolerance: float
) -> None:
    """In bfloat16 with the variable-length kernel, whose queries are then fewer than keys."""
    whole = random_token_sequences((70, 70, 70, 70), 128)
    prompt = whole[0].input_ids[:50]
    sequences = [
        TokenSequence.from_prompt_and_response(prompt.tolist(), each.input_ids[50 + place :].tolist())
        for place, each in enumerate(whole)
    ]
    found = []
    for share in ("auto", "off"):
        runtime = make_runtime(untied_model, param_dtype=param_dtype, share_prefixes=share)
        handle = runtime.build_model()
        result = runtime.forward_backward(handle, sft_micro_batches(sequences, size=4), sft_loss)
        found.append((torch.cat(list(result.output("log_probs"))), runtime.optimizer_step(handle).grad_norm))
        if share == "auto":
            assert result.metrics["tokens_computed"] == (50 + 20 + 19 + 18 + 17, 4 * 50 + 20 + 19 + 18 + 17)
    (shared, norm), (alone, expected) = found
    torch.testing.assert_close(shared, alone, rtol=0.0, atol=tolerance)
    assert norm == pytest.approx(expected, rel=tolerance)


def test_a_step_on_the_gpu_equals_a_step_on_the_cpu(untied_model: Path, make_runtime: MakeRuntime) -> None:
    from rl_backend.contracts import NativeConfig, RuntimeConfig
    from rl_backend.runtime import create_runtime

    data = sft_micro_batches(random_token_sequences((40, 12, 65, 7), 128), size=2)
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-3)
    results = []
    for device in ("cpu", "cuda"):
        config = NativeConfig(device=device, optimizer=optimizer)  # type: ignore[arg-type]
        runtime: Any = create_runtime(RuntimeConfig(hf_path=str(untied_model), backend_cfg=config))
        handle = runtime.build_model()
        losses = train(runtime, handle, data, steps=2)
        results.append((losses, {name: tensor.cpu() for name, tensor in weights(runtime, handle).items()}))
        runtime.close()
    (cpu_losses, cpu_weights), (gpu_losses, gpu_weights) = results
    assert gpu_losses == pytest.approx(cpu_losses, rel=1e-5)
    for name, expected in cpu_weights.items():
        torch.testing.assert_close(gpu_weights[name], expected, rtol=1e-4, atol=1e-5)


def poisoned_loss(
    model_output: ModelOutput, data: PackedBatch, dp_group: Any = None, *, factor: float
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    loss, metrics = sft_loss(model_output, data, dp_group)
    return loss * factor, metrics


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_non_finite_gradient_skips_the_step_and_changes_nothing(
    untied_model: Path, make_runtime: MakeRuntime, factor: float
) -> None:
    runtime = make_runtime(untied_model)
    handle = runtime.build_model()
    data = sft_micro_batches(random_token_sequences((40, 12), 128), size=1)
    train(runtime, handle, data, steps=2)
    before, version = weights(runtime, handle), handle.weight_version
    runtime.zero_grad(handle)
    runtime.forward_backward(handle, data, partial(poisoned_loss, factor=factor))
    result = runtime.optimizer_step(handle)
    assert not result.ok
    assert handle.weight_version == version
    after = weights(runtime, handle)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    losses = train(runtime, handle, data, steps=1)
    assert torch.isfinite(torch.tensor(losses)).all()


@pytest.mark.parametrize("model_fixture", ["tied_model", "untied_model"])
def test_exported_weights_are_those_on_disk_on_the_device(
    model_fixture: str, request: pytest.FixtureRequest, make_runtime: MakeRuntime
) -> None:
    model: Path = request.getfixturevalue(model_fixture)
    on_disk = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    runtime = make_runtime(model)
    handle = runtime.build_model()
    exported = {}
    for name, tensor in runtime.export_weights(handle, byte_budget=256 * 2**10):
        assert tensor.device.type == "cuda"
        exported[name] = tensor.cpu()
    assert exported.keys() == on_disk.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in on_disk.items())
    half = dict(runtime.export_weights(handle, dtype=torch.bfloat16, names=["model.norm.weight"]))
    assert torch.equal(half["model.norm.weight"].cpu(), on_disk["model.norm.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loaded_checkpoint_continues_as_if_training_had_not_stopped(
    untied_model: Path, make_runtime: MakeRuntime, tmp_path: Path, asynchronous: bool
) -> None:
    data = sft_micro_batches(random_token_sequences((40, 12, 65, 7), 128), size=2)
    runtime = make_runtime(untied_model)
    handle = runtime.build_model()
    # The second save in the background takes the pinned buffers of the first.
    for step in (1, 2):
        train(runtime, handle, data, steps=1)
        runtime.save_checkpoint(handle, tmp_path / f"step-{step}", asynchronous=asynchronous)
    expected = train(runtime, handle, data, steps=2)
    resumed = runtime.build_model()
    runtime.load_checkpoint(resumed, tmp_path / "step-2")
    assert resumed.weight_version == 2
    assert train(runtime, resumed, data, steps=2) == pytest.approx(expected, rel=1e-5)
