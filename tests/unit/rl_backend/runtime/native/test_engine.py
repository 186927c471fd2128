"""The native runtime's atoms on one rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_backend.contracts import (
    BatchError,
    CheckpointError,
    ConfigError,
    HandleError,
    ModelOutput,
    PackedBatch,
    UnsupportedError,
)
from rl_backend.runtime.native.engine import NativeRuntime, native_runtime
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.models import write_tiny
from tests.support.native import (
    LENGTHS,
    assert_equal_tensors,
    gradients,
    make_config,
    micro_batches,
    open_runtime,
    token_loss,
    train,
    weights,
)

SPLIT = [[3, 0], [1, 7, 2], [6], [4, 5]]


@pytest.fixture(scope="module")
def runtime(tied_model: Path) -> Iterator[NativeRuntime]:
    with open_runtime(tied_model, max_tokens=200) as opened:
        yield opened


@pytest.fixture
def handle(runtime: NativeRuntime) -> NativeHandle:
    return runtime.build_model()


def test_outputs_come_per_sequence_in_the_order_given(runtime: NativeRuntime, handle: NativeHandle) -> None:
    data = micro_batches(SPLIT, calculate_entropy=True)
    result = runtime.forward_backward(handle, data, token_loss)
    order = [index for indices in SPLIT for index in indices]
    assert sorted(result.outputs) == ["entropy", "log_probs"]
    for name in ("log_probs", "entropy"):
        assert [value.shape[0] for value in result.output(name)] == [LENGTHS[index] for index in order]
        assert not any(value.requires_grad for value in result.output(name))
        assert all(float(value[-1]) == 0.0 for value in result.output(name))
    alone = runtime.forward_backward(handle, micro_batches([[7]]), None, forward_only=True)
    torch.testing.assert_close(alone.output("log_probs")[0], result.output("log_probs")[3], rtol=0, atol=1e-5)
    assert sorted(alone.outputs) == ["log_probs"]


def test_losses_and_metrics_are_merged_over_micro_batches(runtime: NativeRuntime, handle: NativeHandle) -> None:
    def loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        value, metrics = token_loss(model_output, data, dp_group)
        return value, {**metrics, "tokens": data.num_tokens, "constant": torch.tensor(2.0)}

    result = runtime.forward_backward(handle, micro_batches(SPLIT), loss)
    assert len(result.losses) == 4
    assert result.loss == pytest.approx(sum(result.losses))
    assert result.means["nll"] == pytest.approx(result.loss, rel=1e-6)
    assert result.means["tokens"] == sum(LENGTHS) / 4
    assert result.means["constant"] == 2.0


def test_gradients_add_up_over_calls_until_zero_grad(runtime: NativeRuntime, handle: NativeHandle) -> None:
    runtime.forward_backward(handle, micro_batches(SPLIT), token_loss)
    expected = gradients(handle)
    runtime.zero_grad(handle)
    assert not gradients(handle)
    runtime.forward_backward(handle, micro_batches(SPLIT[:2]), token_loss)
    runtime.forward_backward(handle, micro_batches(SPLIT[2:]), token_loss)
    for name, gradient in gradients(handle).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def test_a_forward_only_pass_leaves_no_gradients(runtime: NativeRuntime, handle: NativeHandle) -> None:
    seen: list[bool] = []

    def loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        assert model_output.log_probs is not None
        seen.append(model_output.log_probs.requires_grad)
        return None, {"tokens": data.num_tokens}

    result = runtime.forward_backward(handle, micro_batches(SPLIT), loss, forward_only=True)
    assert seen == [False] * 4
    assert result.losses == ()
    assert result.means["tokens"] == sum(LENGTHS) / 4
    assert not gradients(handle)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda log_probs: None, "returned None; expected a 0-d tensor"),
        (lambda log_probs: 1.0, "returned 1.0; expected"),
        (lambda log_probs: log_probs, "0-d"),
        (lambda log_probs: log_probs.detach().sum(), "with a gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(
    runtime: NativeRuntime, handle: NativeHandle, returned: Any, reason: str
) -> None:
    with pytest.raises(BatchError, match=reason):
        runtime.forward_backward(handle, micro_batches(SPLIT), lambda output, data, dp_group=None: (returned(output[0]), {}))


def test_a_metric_that_is_not_a_number_is_refused_by_name(runtime: NativeRuntime, handle: NativeHandle) -> None:
    def loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        return token_loss(model_output, data)[0], {"per_token": model_output.log_probs}

    with pytest.raises(BatchError, match="per_token"):
        runtime.forward_backward(handle, micro_batches(SPLIT), loss)


def batch_of(ids: list[int], **meta: Any) -> PackedBatch:
    return PackedBatch(torch.tensor(ids), torch.tensor([len(ids)]), meta=meta)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "at least one"),
        ([batch_of([1] * 201)], "201 tokens; max_tokens_per_micro_batch=200"),
        ([batch_of([1, 2]), batch_of([1, 128])], "micro-batch 1 has token 128"),
        ([batch_of([-1, 2])], "token -1"),
        ([batch_of([1, 2], temperature=0.0)], "micro-batch 0: .*temperature.* is 0.0"),
        ([batch_of([1, 2], temperature=float("nan"))], "micro-batch 0: .*temperature.* is nan"),
    ],
    ids=["none", "too long", "beyond the vocabulary", "negative", "zero temperature", "no temperature"],
)
def test_data_that_cannot_run_is_refused(
    runtime: NativeRuntime, handle: NativeHandle, data: list[PackedBatch], reason: str
) -> None:
    with pytest.raises(BatchError, match=reason):
        runtime.forward_backward(handle, data, None, forward_only=True)


def test_a_sequence_longer_than_the_model_reads_is_refused(tied_model: Path) -> None:
    with open_runtime(tied_model) as opened, pytest.raises(BatchError, match="the model has 512 positions"):
        opened.forward_backward(opened.build_model(), [batch_of([1] * 513)], None, forward_only=True)


def test_training_without_a_loss_and_replay_without_a_router_are_refused(
    runtime: NativeRuntime, handle: NativeHandle
) -> None:
    with pytest.raises(BatchError, match="without loss_fn"):
        runtime.forward_backward(handle, micro_batches(SPLIT), None)
    with pytest.raises(UnsupportedError, match="no router"):
        runtime.forward_backward(handle, micro_batches(SPLIT), token_loss, router_replay="record")


def test_modes_nest_and_restore_what_was_before(runtime: NativeRuntime, handle: NativeHandle) -> None:
    odd = next(iter(handle.model.children()))
    odd.eval()
    before = [module.training for module in handle.model.modules()]
    with runtime.eval_mode(handle):
        assert not any(module.training for module in handle.model.modules())
        with runtime.train_mode(handle):
            assert all(module.training for module in handle.model.modules())
        assert not any(module.training for module in handle.model.modules())
    assert [module.training for module in handle.model.modules()] == before
    with pytest.raises(ValueError, match="inside"), runtime.eval_mode(handle):
        raise ValueError("inside")
    assert [module.training for module in handle.model.modules()] == before


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_forward_only_handle_gives_the_outputs_of_a_trained_one_beside_it(tied_model: Path, param_dtype: str) -> None:
    with open_runtime(tied_model, param_dtype=param_dtype) as opened:
        policy, reference = opened.build_model(), opened.build_model(forward_only=True)
        outputs = [
            opened.forward_backward(each, micro_batches(SPLIT), None, forward_only=True).output("log_probs")
            for each in (policy, reference)
        ]
        assert all(torch.equal(first, second) for first, second in zip(*outputs, strict=True))
        assert all(value.dtype == torch.float32 for value in weights(policy).values())
        assert all(value.dtype == getattr(torch, param_dtype) for value in weights(reference).values())
        before = weights(reference)
        train(opened, policy, 2)
        assert_equal_tensors(weights(reference), before)


@pytest.mark.parametrize(
    "operation",
    [
        lambda runtime, handle: runtime.forward_backward(handle, micro_batches(SPLIT), token_loss),
        lambda runtime, handle: runtime.optimizer_step(handle),
        lambda runtime, handle: runtime.lr_scheduler_step(handle),
        lambda runtime, handle: runtime.zero_grad(handle),
        lambda runtime, handle: runtime.train_mode(handle).__enter__(),
        lambda runtime, handle: runtime.save_checkpoint(handle, "unused"),
    ],
    ids=["forward_backward", "optimizer_step", "lr_scheduler_step", "zero_grad", "train_mode", "save_checkpoint"],
)
def test_a_forward_only_handle_is_refused_where_gradients_are_needed(runtime: NativeRuntime, operation: Any) -> None:
    with pytest.raises(HandleError, match="forward-only"):
        operation(runtime, runtime.build_model(forward_only=True, name="reference"))


def test_a_successful_step_advances_the_weight_version(runtime: NativeRuntime, handle: NativeHandle) -> None:
    assert handle.weight_version == 0
    train(runtime, handle, 3)
    assert handle.weight_version == 3
    runtime.zero_grad(handle)
    with pytest.raises(HandleError, match="without gradients"):
        runtime.optimizer_step(handle)
    assert handle.weight_version == 3


def test_bfloat16_training_learns(tied_model: Path) -> None:
    with open_runtime(tied_model, param_dtype="bfloat16") as opened:
        handle = opened.build_model()
        losses = []
        for _ in range(8):
            opened.zero_grad(handle)
            losses.append(opened.forward_backward(handle, micro_batches(SPLIT), token_loss).loss)
            assert opened.optimizer_step(handle).ok
        assert losses[-1] < 0.8 * losses[0]
        assert all(value.dtype == torch.float32 for value in weights(handle).values())


def test_one_seed_gives_one_result(tied_model: Path) -> None:
    curves = []
    for seed in (3, 3, 4):
        with open_runtime(tied_model, seed=seed) as opened:
            curves.append((train(opened, opened.build_model(), 3), torch.rand(3).tolist()))
    assert curves[0] == curves[1]
    assert curves[2][1] != curves[0][1]


def test_handles_of_another_or_a_closed_runtime_are_refused(tied_model: Path, runtime: NativeRuntime) -> None:
    other = native_runtime(make_config(tied_model))
    foreign = other.build_model(name="foreign")
    with pytest.raises(HandleError, match="'foreign'"):
        runtime.zero_grad(foreign)
    other.close()
    other.close()
    with pytest.raises(HandleError, match="closed"):
        other.zero_grad(foreign)
    with pytest.raises(HandleError, match="closed"):
        other.build_model()


def test_checkpoint_requests_that_cannot_be_served_are_refused(
    runtime: NativeRuntime, handle: NativeHandle, tmp_path: Path, tied_model: Path
) -> None:
    with pytest.raises(ConfigError, match="asynchronous=False"):
        runtime.save_checkpoint(handle, tmp_path / "hf", hf=True, asynchronous=True)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        runtime.load_checkpoint(handle, tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="Hugging Face directory"):
        runtime.load_checkpoint(handle, tied_model)
    assert not (tmp_path / "hf").exists()


def test_a_model_without_weights_on_disk_is_refused(tmp_path: Path) -> None:
    with open_runtime(tmp_path / "absent") as opened, pytest.raises(CheckpointError, match="absent"):
        opened.build_model()


def test_models_hold_plain_modules_that_a_caller_may_inspect(handle: NativeHandle) -> None:
    assert isinstance(handle.model, nn.Module)
    assert list(handle.parameters) == list(handle.weight_names)


class Interrupted(BaseException):
    """No ``Exception``, as ``KeyboardInterrupt``, which pytest would take for itself."""


@pytest.mark.parametrize("error", [ValueError, Interrupted])
@pytest.mark.parametrize(
    "stages", [{}, {"parallel": {"vpp": 2}, "pipeline_schedule": "interleaved-1f1b"}], ids=["plain", "stages"]
)
def test_gradients_of_a_pass_that_ended_in_its_middle_are_not_stepped_with(
    tied_model: Path, error: type[BaseException], stages: dict[str, Any]
) -> None:
    calls: list[int] = []

    def loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise error("in the second micro-batch")
        return token_loss(model_output, data, dp_group)

    with open_runtime(tied_model, **stages) as runtime:
        handle = runtime.build_model()
        data = micro_batches([[0, 1], [2, 3]])
        runtime.forward_backward(handle, data, token_loss)
        expected = gradients(handle)
        runtime.zero_grad(handle)
        with pytest.raises(error, match="in the second"):
            runtime.forward_backward(handle, data, loss, forward_only=True)
        runtime.forward_backward(handle, data, token_loss)
        assert_equal_tensors(gradients(handle), expected)
        with pytest.raises(error, match="in the second"):
            runtime.forward_backward(handle, data, loss)
        with pytest.raises(HandleError, match="its gradients are incomplete; call zero_grad first"):
            runtime.optimizer_step(handle)
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, data, token_loss)
        assert_equal_tensors(gradients(handle), expected)
        assert runtime.optimizer_step(handle).ok


@pytest.mark.parametrize("stages", [{}, {"parallel": {"vpp": 2}, "pipeline_schedule": "zbv"}], ids=["plain", "stages"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_closed_runtime_keeps_no_tensor_for_those_who_still_have_its_handles(
    tied_model: Path, stages: dict[str, Any], forward_only: bool
) -> None:
    with open_runtime(tied_model, **stages) as runtime:
        handle = runtime.build_model(forward_only=forward_only)
        if not forward_only:
            train(runtime, handle, 1)
        held = [weakref.ref(tensor.untyped_storage()) for tensors in handle.part_tensors().values() for tensor in tensors]
        modules = [weakref.ref(module) for module in (handle.model, *handle.stages.values())]
        assert all(each() is not None for each in modules)
    assert not any(each() for each in (*modules, *held))
    assert not handle.stages and not handle.parameters


def test_stages_of_a_pipeline_record_the_modules_of_the_whole_model(tmp_path: Path) -> None:
    """A stage of one layer has that layer's path; one of several layers has a path that no module of the model has."""
    three = write_tiny("qwen3", tmp_path / "three", num_hidden_layers=3)
    data = micro_batches([[0, 1], [2]])
    with open_runtime(three) as runtime:
        expected = runtime.activations(runtime.build_model(), data)
    assert {f"model.layers.{number}" for number in range(3)} <= expected[0].keys()
    for stages in (2, 3):
        with open_runtime(three, parallel={"vpp": stages}, pipeline_schedule="interleaved-1f1b") as runtime:
            found = runtime.activations(runtime.build_model(), data)
        assert len(found) == len(data)
        for mine, whole in zip(found, expected, strict=True):
            assert list(mine) == list(whole)
            for path, output in whole.items():
                torch.testing.assert_close(mine[path], output, msg=path)
