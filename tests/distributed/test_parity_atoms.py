"""The atoms that a comparison of runtimes needs: activations and gradients, the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import BatchError, ConfigError, HandleError
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.native import (
    assert_equal_tensors,
    gradients,
    micro_batches,
    open_runtime,
    relative_difference,
    token_loss,
    train,
)
from tests.support.rank_pool import RankPool

HIDDEN_SIZE = 64
SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]


def exported_gradients(runtime: NativeRuntime, handle: NativeHandle) -> dict[str, Tensor]:
    return {name: gradient.clone() for name, gradient in runtime.export_gradients(handle)}


def gradients_job(model: str, param_dtype: str) -> dict[str, Tensor]:
    """Exported gradients, after checks against those that the optimizer reads."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with open_runtime(model, param_dtype=param_dtype) as runtime:
        handle = runtime.build_model()
        runtime.forward_backward(handle, micro_batches(SPLIT[rank::size], dp_size=size), token_loss)
        exported = exported_gradients(runtime, handle)
        assert list(exported) == [info.name for info in runtime.weight_infos(handle)]
        assert all(gradient.dtype == torch.float32 for gradient in exported.values())
        assert_equal_tensors(exported, {handle.weight_names[name]: value for name, value in gradients(handle).items()})
        norm = torch.stack([gradient.double().square().sum() for gradient in exported.values()]).sum().sqrt().item()
        assert runtime.optimizer_step(handle).grad_norm == pytest.approx(norm, rel=1e-9)
        chosen = dict(runtime.export_gradients(handle, names=["model.norm.weight"]))
        assert list(chosen) == ["model.norm.weight"]
    return exported


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_every_rank_exports_the_whole_averaged_gradient_that_the_optimizer_takes_the_norm_of(
    ranks: RankPool, untied_model: Path, param_dtype: str
) -> None:
    one = gradients_job(str(untied_model), param_dtype)
    for exported in ranks.run(gradients_job, str(untied_model), param_dtype, world_size=2):
        assert list(exported) == list(one)
        for name, gradient in exported.items():
            assert relative_difference(gradient, one[name]) < (1e-5 if param_dtype == "float32" else 0.05), name


def activations_job(model: str, training: bool) -> list[dict[str, Tensor]]:
    """Activations of this rank's micro-batches; training goes on after them."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with open_runtime(model) as runtime:
        handle = runtime.build_model(forward_only=not training)
        recorded = [dict(one) for one in runtime.activations(handle, micro_batches(SPLIT[rank::size], dp_size=size))]
        if training:
            train(runtime, handle, 1)
        assert not any(module._forward_hooks for module in handle.model.modules() if "RMSNorm" in type(module).__name__)
    return recorded


@pytest.mark.parametrize("training", [True, False])
def test_ranks_record_what_one_rank_records_of_the_same_micro_batches(
    ranks: RankPool, untied_model: Path, training: bool
) -> None:
    one = activations_job(str(untied_model), training)
    per_rank = ranks.run(activations_job, str(untied_model), training, world_size=2)
    for index, expected in enumerate(one):
        recorded = per_rank[index % 2][index // 2]
        assert list(recorded) == list(expected)
        assert {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"} <= recorded.keys()
        for path, output in recorded.items():
            assert output.shape == (len(expected["model.norm"]), HIDDEN_SIZE)
            assert output.dtype == torch.float32
            torch.testing.assert_close(output, expected[path], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_recorded_is_refused(tied_model: Path) -> None:
    with open_runtime(tied_model) as runtime:
        handle, reference = runtime.build_model(), runtime.build_model(forward_only=True)
        with pytest.raises(HandleError, match="without gradients"):
            runtime.export_gradients(handle)
        with pytest.raises(HandleError, match="forward-only"):
            runtime.export_gradients(reference)
        with pytest.raises(BatchError, match="without micro-batches"):
            runtime.activations(handle, [])
        runtime.forward_backward(handle, micro_batches(SPLIT), token_loss)
        with pytest.raises(ConfigError, match=r"model\.nrom\.weight"):
            runtime.export_gradients(handle, names=["model.nrom.weight"])
        runtime.to(handle, "cpu", model=False, optimizer=False)
        with pytest.raises(HandleError, match="in host memory"):
            runtime.export_gradients(handle)
