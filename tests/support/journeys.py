"""A model whose parts travel at random between the calls of its training, beside one that stays where it is."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_backend.contracts import StepResult
from rl_backend.contracts.atoms import PARTS
from rl_backend.runtime.bridge.engine.engine import BridgeRuntime
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import optimizer_shards
from tests.support.native import assert_equal_tensors, deal, micro_batches, open_runtime, optimizer_state, token_loss
from tests.support.offloads import host_bytes

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]

NEEDS: Mapping[str, tuple[str, ...]] = {
    "backward": ("model", "grad"),
    "look": ("model",),
    "gradients": ("grad",),
    "step": ("model", "optimizer", "grad"),
    "weights": ("model",),
    "drop": (),
}
"""Call -> parts that must be on the device."""

CALLS = ("backward", "step", "look", "weights", "backward", "gradients", "drop", "backward", "backward", "step", "look")


@contextmanager
def open_either(backend: str, model: str, settings: Mapping[str, Any]) -> Iterator[NativeRuntime | BridgeRuntime]:
    if backend == "native":
        with open_runtime(model, **settings) as native:
            yield native
    else:
        with open_bridge(model, **settings) as bridge:
            yield bridge


def journey_job(backend: str, model: str, settings: Mapping[str, Any], seed: int = 0) -> None:
    """Makes the same calls on two handles, parts of one of which come and go in between; nothing may differ.

    Every rank makes the same journey. In the end every part is away, and little of the handle's memory is left.
    """
    choose = random.Random(seed)
    with open_either(backend, model, settings) as runtime:
        still = runtime.build_model()
        before = live_bytes()
        moved = runtime.build_model()
        for number, call in enumerate(CALLS):
            for _ in range(2):
                move(runtime, moved, "cpu", choose.sample(PARTS, choose.randint(1, 3)))
                move(runtime, moved, "device", choose.sample(PARTS, choose.randint(0, 2)))
            for part in choose.sample(NEEDS[call], len(NEEDS[call])):
                move(runtime, moved, "device", [part])
            assert_same(*(result(runtime, handle, call, number) for handle in (moved, still)))
        move(runtime, moved, "device", PARTS)
        result(runtime, moved, "backward", 0)
        assert_same(*(held(handle) for handle in (moved, still)))
        move(runtime, moved, "cpu", PARTS)
        away = [host_bytes(moved.offload, part) for part in PARTS]
        assert min(away) > 0
        assert live_bytes(moved) - before < 0.1 * sum(away)


def move(runtime: Any, handle: Any, device: str, parts: Any) -> None:
    runtime.to(handle, device, **{part: part in parts for part in PARTS})


def result(runtime: Any, handle: Any, call: str, seed: int) -> Any:
    """What a call gives."""
    groups = runtime.engine.groups
    data = micro_batches(deal(SPLIT, groups.dp_size)[groups.dp_rank], dp_size=groups.dp_size, seed=seed)
    match call:
        case "backward":
            return runtime.forward_backward(handle, data, token_loss).losses
        case "look":
            return dict(runtime.forward_backward(handle, data, None, forward_only=True).outputs)
        case "gradients":
            return {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
        case "weights":
            return {name: tensor.clone() for name, tensor in runtime.export_weights(handle)}
        case "step":
            step = runtime.optimizer_step(handle)
            assert step.ok
            runtime.lr_scheduler_step(handle)
            runtime.zero_grad(handle)
            return step
        case _:
            return runtime.zero_grad(handle)


def held(handle: NativeHandle | BridgeHandle) -> dict[str, Tensor]:
    """The optimizer's state: what no call above gives."""
    return optimizer_state(handle) if isinstance(handle, NativeHandle) else optimizer_shards(handle)


def assert_same(first: Any, second: Any) -> None:
    if isinstance(first, Mapping):
        flat = [flattened(each) for each in (first, second)]
        assert_equal_tensors(*flat)
    elif isinstance(first, StepResult):
        assert tuple(first) == tuple(second)
    else:
        assert first == second


def flattened(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value if isinstance(value, Tensor) else torch.cat(list(value)) for name, value in values.items()}


def live_bytes(handle: Any = None) -> int:
    """Bytes of the storages of all tensors that Python knows, host buffers of ``handle`` left out."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not issubclass(type(each), DTensor)]
    sizes = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if each.device.type != "meta"
    }
    for part in PARTS if handle is not None else ():
        for _, host in handle.offload._moved.get(part, ()):
            sizes.pop(host.untyped_storage()._cdata, None)
    return sum(sizes.values())
