"""Native runtimes and the jobs that the distributed tests run on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_backend.contracts import LossFn, MetricValue, ModelOutput, NativeConfig, OptimizerConfig, PackedBatch, RuntimeConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime.native.engine import NativeRuntime, native_runtime
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.sft_batches import random_token_sequences

# The models are so small that a second thread only costs time.
torch.set_num_threads(1)

VOCAB_SIZE = 128
LENGTHS = (5, 17, 9, 30, 2, 41, 12, 23)

type Split = Sequence[Sequence[int]]
"""Indices into the sequences, by micro-batch."""


def token_loss(
    model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Mean negative log-likelihood over the tokens of all ranks."""
    assert model_output.log_probs is not None
    mask = data.token_field("loss_mask")
    nll = -(model_output.log_probs * mask).sum()
    return nll / data.meta["batch_num_tokens"] * data.meta["dp_size"], {"nll": (nll, mask.sum())}


def make_config(
    model: Path | str, /, *, seed: int = 0, max_tokens: int = 8192, optimizer: OptimizerConfig | None = None, **native: Any
) -> RuntimeConfig:
    backend_cfg = NativeConfig(device="cpu", optimizer=optimizer or OptimizerConfig(lr=1e-3), **native)
    return RuntimeConfig(hf_path=str(model), seed=seed, max_tokens_per_micro_batch=max_tokens, backend_cfg=backend_cfg)


@contextmanager
def open_runtime(model: Path | str, /, **settings: Any) -> Iterator[NativeRuntime]:
    runtime = native_runtime(make_config(model, **settings))
    try:
        yield runtime
    finally:
        runtime.close()


@contextmanager
def open_in_float64(model: Path | str, /, **settings: Any) -> Iterator[NativeRuntime]:
    """As :func:`open_runtime`, with masters, passes and gradients in float64, which no configuration can ask for.

    What layouts differ by there is a mistake; in float32 it may be the rounding of an ill-conditioned model.
    """
    config = make_config(model, **settings)
    exact = config.backend_cfg.model_copy(update={"param_dtype": "float64", "reduce_dtype": "float64"})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        runtime = native_runtime(config.model_copy(update={"backend_cfg": exact}))
        try:
            yield runtime
        finally:
            runtime.close()
    finally:
        torch.set_default_dtype(before)


def micro_batches(split: Split, *, dp_size: int = 1, seed: int = 0, **meta: Any) -> list[PackedBatch]:
    """Micro-batches of the sequences with ``LENGTHS``; the denominator counts all of these, whatever the split."""
    sequences = random_token_sequences(LENGTHS, VOCAB_SIZE, seed)
    denominators = {"batch_num_tokens": float(sum(LENGTHS) - len(LENGTHS)), "dp_size": dp_size}
    return [pack([sequences[index] for index in indices], {**denominators, **meta}) for indices in split]


def deal(split: Split, dp_size: int) -> list[list[list[int]]]:
    """Micro-batches dealt out to ranks in turn."""
    return [[list(indices) for indices in split[rank::dp_size]] for rank in range(dp_size)]


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor. A collective for a sharded one."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def gradients(handle: NativeHandle) -> dict[str, Tensor]:
    return {name: full(value.grad) for name, value in handle.parameters.items() if value.grad is not None}


def weights(handle: NativeHandle) -> dict[str, Tensor]:
    return {name: full(value) for name, value in handle.parameters.items()}


def optimizer_state(handle: NativeHandle) -> dict[str, Tensor]:
    assert handle.optimizer is not None
    return {name: full(value) for name, value in handle.optimizer.state_tensors().items()}


def train(runtime: NativeRuntime, handle: NativeHandle, steps: int, *, first_seed: int = 0) -> list[tuple[float, float]]:
    """Loss over all ranks and gradient norm of each of ``steps`` steps on two micro-batches a rank."""
    return train_with(token_loss, runtime, handle, steps, first_seed=first_seed)


def train_with(
    loss_fn: LossFn, runtime: NativeRuntime, handle: NativeHandle, steps: int, *, first_seed: int = 0
) -> list[tuple[float, float]]:
    """As :func:`train`, with a loss of one's own."""
    rank, size = handle.data_parallel_rank, handle.data_parallel_size
    mine = list(range(rank, 8, size))
    split = [mine[:2], mine[2:]] if len(mine) > 2 else [mine[:1], mine[1:]]
    curve = []
    for step in range(steps):
        runtime.zero_grad(handle)
        result = runtime.forward_backward(handle, micro_batches(split, dp_size=size, seed=first_seed + step), loss_fn)
        ok, norm, _ = runtime.optimizer_step(handle)
        assert ok
        runtime.lr_scheduler_step(handle)
        loss = torch.tensor(result.loss / size, dtype=torch.float64)
        if size > 1:
            dist.all_reduce(loss, group=handle.groups.dp_group)
        curve.append((loss.item(), norm))
    return curve


def gradients_job(model: str, split: list[list[list[int]]], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Whole gradients of the micro-batches that ``split`` gives to this rank; from rank 0 only."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open_runtime(model, **settings) as runtime:
        handle = runtime.build_model()
        runtime.forward_backward(handle, micro_batches(split[rank], dp_size=len(split)), token_loss)
        result = gradients(handle)
    return result if rank == 0 else {}


def relative_difference(value: Tensor, expected: Tensor) -> float:
    """Of the norms; 0 where both are 0."""
    difference = float((value - expected).norm())
    return difference / float(expected.norm()) if difference else 0.0


def assert_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5, *, dtype: torch.dtype | None = None
) -> None:
    """The same names, relative differences below ``tolerance`` and, where given, one dtype."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert dtype is None or value.dtype == dtype, name
        assert relative_difference(value, expected[name]) < tolerance, name


def assert_equal_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"differ: {different}"
