"""Data, tensor, context and expert parallelism over NCCL, one process per device."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rl_backend.algorithm import sft_loss
from rl_backend.contracts import NativeConfig, OptimizerConfig, ParallelConfig, RuntimeConfig
from rl_backend.runtime import create_runtime
from tests.support.moe import write_moe
from tests.support.rank_pool import RankPool
from tests.support.sft_batches import random_token_sequences, sft_micro_batches

pytestmark = pytest.mark.gpu

LENGTHS = (40, 12, 65, 7, 33, 20, 9, 50)


type Training = tuple[list[float], dict[str, list[float]]]


def train_one_rank(model: str, port: int, layout: dict[str, int], device: str = "cuda") -> Training:
    """Gradient norms of three steps, and a few numbers of every weight after them."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    parallel = ParallelConfig(**layout)
    native = NativeConfig(device=device, parallel=parallel, optimizer=OptimizerConfig(lr=1e-3, eps=1e-3))
    runtime = create_runtime(RuntimeConfig(hf_path=model, backend_cfg=native))
    try:
        handle = runtime.build_model()
        place = {"dp_rank": handle.data_parallel_rank, "dp_size": handle.data_parallel_size}
        data = sft_micro_batches(random_token_sequences(LENGTHS, 128), 2, **place)
        norms = []
        for _ in range(3):
            runtime.zero_grad(handle)
            runtime.forward_backward(handle, data, sft_loss)
            step = runtime.optimizer_step(handle)
            assert step.ok
            norms.append(step.grad_norm)
        numbers = {name: tensor.flatten()[:8].tolist() for name, tensor in runtime.export_weights(handle)}
        return norms, numbers
    finally:
        runtime.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def require_same_training(model: Path, layout: dict[str, int], device: str = "cuda") -> None:
    """Two ranks in this layout train as one does."""
    pool = RankPool(size=2)
    job = {"init_group": False, "timeout": 240}
    try:
        (one,) = pool.run(train_one_rank, str(model), free_port(), {}, device, world_size=1, **job)
        two = pool.run(train_one_rank, str(model), free_port(), layout, device, world_size=2, **job)
    finally:
        pool.close()
    assert two[0] == two[1]
    assert two[0][0] == pytest.approx(one[0], rel=1e-5)
    for name, numbers in one[1].items():
        assert two[0][1][name] == pytest.approx(numbers, rel=1e-4, abs=1e-5)


@pytest.mark.gpu(count=2)
def test_two_ranks_over_nccl_train_as_one_does(untied_model: Path) -> None:
    require_same_training(untied_model, {})


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("layout", [{"ep": 2}, {"etp": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"cp": 2}], ids=str)
def test_a_mixture_of_experts_on_two_ranks_trains_as_on_one(tmp_path: Path, layout: dict[str, int]) -> None:
    require_same_training(write_moe("qwen3_moe", tmp_path / "model"), layout)
