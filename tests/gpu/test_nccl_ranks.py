"""Data parallel over NCCL, one process per device."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rl_backend.algorithm import sft_loss
from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig
from rl_backend.runtime import create_runtime
from tests.support.rank_pool import RankPool
from tests.support.sft_batches import random_token_sequences, sft_micro_batches

pytestmark = pytest.mark.gpu

LENGTHS = (40, 12, 65, 7, 33, 20, 9, 50)


def train_one_rank(model: str, port: int, dp_size: int) -> tuple[list[float], dict[str, list[float]]]:
    """Gradient norms of three steps, and a few numbers of every weight after them."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    native = NativeConfig(device="cuda", optimizer=OptimizerConfig(lr=1e-3, eps=1e-3))
    runtime = create_runtime(RuntimeConfig(hf_path=model, backend_cfg=native))
    try:
        handle = runtime.build_model()
        data = sft_micro_batches(random_token_sequences(LENGTHS, 128), 2, dp_rank=handle.data_parallel_rank, dp_size=dp_size)
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


@pytest.mark.gpu(count=2)
def test_two_ranks_over_nccl_train_as_one_does(untied_model: Path) -> None:
    pool = RankPool(size=2)
    try:
        (one,) = pool.run(train_one_rank, str(untied_model), free_port(), 1, world_size=1, init_group=False, timeout=240)
        two = pool.run(train_one_rank, str(untied_model), free_port(), 2, world_size=2, init_group=False, timeout=240)
    finally:
        pool.close()
    assert two[0] == two[1]
    assert two[0][0] == pytest.approx(one[0], rel=1e-5)
    for name, numbers in one[1].items():
        assert two[0][1][name] == pytest.approx(numbers, rel=1e-4, abs=1e-5)
