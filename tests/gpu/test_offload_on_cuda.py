"""Device memory that each part gives back when it moves to host memory, and what it is given back from."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from rl_backend.algorithm import sft_loss
from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig, UnsupportedError
from rl_backend.contracts.atoms import PARTS
from rl_backend.runtime import create_runtime
from rl_backend.runtime.bridge.config import BridgeConfig
from tests.support.offloads import host_bytes
from tests.support.sft_batches import random_token_sequences, sft_micro_batches

pytestmark = pytest.mark.gpu

type Backend = Literal["native", "bridge"]

VOCAB_SIZE = 8192


@pytest.fixture(params=["native", "bridge"])
def runtime(wider_model: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    backend: Backend = request.param
    config = {"native": NativeConfig, "bridge": BridgeConfig}[backend](device="cuda", optimizer=OptimizerConfig(lr=1e-3))
    try:
        opened = create_runtime(RuntimeConfig(backend=backend, hf_path=str(wider_model), backend_cfg=config))
    except UnsupportedError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


def backward(runtime: Any, handle: Any) -> list[float]:
    data = sft_micro_batches(random_token_sequences((40, 12, 65, 7), VOCAB_SIZE), size=2)
    return list(runtime.forward_backward(handle, data, sft_loss).losses)


def step(runtime: Any, handle: Any) -> None:
    assert runtime.optimizer_step(handle).ok
    runtime.zero_grad(handle)


def move(runtime: Any, handle: Any, device: str, *parts: str) -> None:
    runtime.to(handle, device, **{part: part in parts for part in PARTS})


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def host_buffers(handle: Any) -> set[int]:
    return {host.data_ptr() for moved in handle.offload._moved.values() for _, host in moved}


def weights(runtime: Any, handle: Any) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in runtime.export_weights(handle)}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_gives_back_its_device_memory(runtime: Any, part: str, record_property: Callable[..., None]) -> None:
    handle = runtime.build_model()
    backward(runtime, handle)
    step(runtime, handle)
    backward(runtime, handle)
    full = allocated()
    move(runtime, handle, "cpu", part)
    away = host_bytes(handle.offload, part)
    parameters = sum(info.nbytes for info in runtime.weight_infos(handle))
    assert away >= parameters * (2 if part == "optimizer" else 1)
    returned = full - allocated()
    record_property("host_bytes", away)
    record_property("returned_bytes", returned)
    assert returned >= away
    move(runtime, handle, "device", part)
    assert allocated() <= full


def test_parts_that_are_all_away_leave_nothing_and_use_their_host_buffers_again(runtime: Any) -> None:
    still = runtime.build_model()
    # What libraries allocate in their first passes stays.
    backward(runtime, still)
    step(runtime, still)
    before = allocated()
    handle = runtime.build_model()
    backward(runtime, handle)
    step(runtime, handle)
    buffers: set[int] = set()
    for leaving, returning in zip(permutations(PARTS), reversed(list(permutations(PARTS))), strict=True):
        assert backward(runtime, handle) == pytest.approx(backward(runtime, still), rel=1e-4)
        full, reserved = allocated() - before, torch.cuda.memory_reserved()
        for part in leaving:
            move(runtime, handle, "cpu", part)
        assert allocated() - before < 0.1 * full
        assert reserved - torch.cuda.memory_reserved() > 0.3 * full, "memory that other processes can take"
        assert all(host.is_pinned() for moved in handle.offload._moved.values() for _, host in moved)
        assert not buffers or host_buffers(handle) == buffers
        buffers = host_buffers(handle)
        for part in returning:
            move(runtime, handle, "device", part)
        step(runtime, handle)
        step(runtime, still)
    found, expected = weights(runtime, handle), weights(runtime, still)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
