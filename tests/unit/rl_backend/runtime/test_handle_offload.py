"""Where the parts of a handle are, by what their storages hold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.cluster.placement import memory_environment
from rl_backend.contracts import HandleError, UnsupportedError
from rl_backend.runtime import handle as handle_module
from rl_backend.runtime.handle import Offload
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.native import micro_batches, open_runtime, token_loss, train
from tests.support.offloads import host_bytes, parts_away

SPLIT = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runtime(tied_model: Path, request: pytest.FixtureRequest) -> Iterator[NativeRuntime]:
    with open_runtime(tied_model, param_dtype=request.param) as opened:
        yield opened


@pytest.fixture
def handle(runtime: NativeRuntime) -> NativeHandle:
    built = runtime.build_model(name="policy")
    train(runtime, built, 1)
    return built


def device_bytes(handle: NativeHandle) -> dict[str, int]:
    """Bytes of the storages behind each part."""
    storages = {
        part: {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        for part, tensors in handle.part_tensors().items()
    }
    return {part: sum(sizes.values()) for part, sizes in storages.items()}


@pytest.mark.parametrize("part", ["model", "optimizer", "grad"])
def test_a_part_that_leaves_frees_its_memory_and_no_other(runtime: NativeRuntime, handle: NativeHandle, part: Any) -> None:
    before = device_bytes(handle)
    chosen = {name: name == part for name in ("model", "optimizer", "grad")}
    runtime.to(handle, "cpu", **chosen)
    runtime.to(handle, "cpu", **chosen)
    assert device_bytes(handle) == {**before, part: 0}
    assert host_bytes(handle.offload, part) == before[part]
    runtime.to(handle, "device", **chosen)
    assert device_bytes(handle) == before
    assert host_bytes(handle.offload, part) == 0


@pytest.mark.parametrize(
    ("part", "operation"),
    [
        ("model", lambda rt, h, path: rt.forward_backward(h, micro_batches(SPLIT), token_loss)),
        ("model", lambda rt, h, path: rt.forward_backward(h, micro_batches(SPLIT), None, forward_only=True)),
        ("grad", lambda rt, h, path: rt.forward_backward(h, micro_batches(SPLIT), token_loss)),
        ("model", lambda rt, h, path: rt.optimizer_step(h)),
        ("optimizer", lambda rt, h, path: rt.optimizer_step(h)),
        ("grad", lambda rt, h, path: rt.optimizer_step(h)),
        ("model", lambda rt, h, path: rt.export_weights(h)),
        ("model", lambda rt, h, path: rt.save_checkpoint(h, path)),
        ("optimizer", lambda rt, h, path: rt.save_checkpoint(h, path)),
        ("model", lambda rt, h, path: rt.save_checkpoint(h, path, hf=True)),
        ("optimizer", lambda rt, h, path: rt.load_checkpoint(h, path)),
    ],
)
def test_an_atom_that_needs_a_part_says_that_it_is_away_and_how_to_get_it_back(
    runtime: NativeRuntime, handle: NativeHandle, tmp_path: Path, part: str, operation: Any
) -> None:
    runtime.to(handle, "cpu", **{name: name == part for name in ("model", "optimizer", "grad")})
    with pytest.raises(HandleError, match=rf'{part} is in host memory; call to\(handle, "device".*{part}=True'):
        operation(runtime, handle, tmp_path / "saved")
    runtime.to(handle, "device")
    train(runtime, handle, 1)


def test_what_does_not_need_a_part_works_without_it(runtime: NativeRuntime, handle: NativeHandle) -> None:
    runtime.to(handle, "cpu", model=False)
    runtime.forward_backward(handle, micro_batches(SPLIT), None, forward_only=True)
    assert sum(1 for _ in runtime.export_weights(handle)) == len(handle.parameters)
    runtime.to(handle, "device", grad=False)
    runtime.zero_grad(handle)
    train(runtime, handle, 1)


def test_steps_are_told_while_everything_is_away(runtime: NativeRuntime, handle: NativeHandle) -> None:
    (before,) = runtime.list_optimizer_states(handle)
    runtime.to(handle, "cpu")
    assert runtime.list_optimizer_states(handle) == [before] and before.step == 1
    runtime.to(handle, "device")
    train(runtime, handle, 1)
    assert [each.step for each in runtime.list_optimizer_states(handle)] == [2]


def test_gradients_dropped_while_away_do_not_come_back(runtime: NativeRuntime, handle: NativeHandle) -> None:
    runtime.to(handle, "cpu", model=False, optimizer=False)
    runtime.zero_grad(handle)
    assert host_bytes(handle.offload, "grad") == 0
    runtime.to(handle, "device")
    assert all(parameter.grad is None for parameter in handle.parameters.values())


def test_a_forward_only_handle_moves_the_model_it_has(runtime: NativeRuntime) -> None:
    reference = runtime.build_model(forward_only=True)
    expected = runtime.forward_backward(reference, micro_batches(SPLIT), None, forward_only=True).output("log_probs")
    runtime.to(reference, "cpu")
    assert device_bytes(reference) == {"model": 0}
    runtime.to(reference, "device")
    moved = runtime.forward_backward(reference, micro_batches(SPLIT), None, forward_only=True).output("log_probs")
    assert all(torch.equal(first, second) for first, second in zip(moved, expected, strict=True))


def test_an_unknown_place_is_refused(runtime: NativeRuntime, handle: NativeHandle) -> None:
    with pytest.raises(HandleError, match="'cuda'"):
        runtime.to(handle, "cuda")  # type: ignore[arg-type]


def test_tensors_that_share_a_storage_move_once_and_stay_views() -> None:
    base = torch.arange(10.0)
    first, second = base[:4], base[4:]
    offload = Offload("policy", torch.device("cpu"))
    offload.offload("model", [first, second])
    assert host_bytes(offload, "model") == 40
    assert base.untyped_storage().nbytes() == 0
    offload.reload("model")
    assert base.tolist() == list(range(10))
    base.mul_(2)
    assert second[0] == 8


def test_a_part_for_which_there_is_no_memory_stays_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.arange(4.0), torch.arange(6.0)
    offload = Offload("policy", torch.device("cpu"))
    offload.offload("model", [first, second])
    original = handle_module._bytes

    def too_large(storage: torch.UntypedStorage) -> torch.Tensor:
        if storage.nbytes() == 24:
            raise torch.OutOfMemoryError("out of memory")
        return original(storage)

    with monkeypatch.context() as patch:
        patch.setattr(handle_module, "_bytes", too_large)
        with pytest.raises(torch.OutOfMemoryError):
            offload.reload("model")
    assert parts_away(offload) == ["model"]
    assert host_bytes(offload, "model") == 40
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    offload.reload("model")
    assert first.tolist() == list(range(4))
    assert second.tolist() == list(range(6))


def test_memory_that_cannot_be_released_is_refused_before_anything_moves(tmp_path: Path) -> None:
    mapped = torch.from_file(str(tmp_path / "mapped"), shared=True, size=4)
    mine = torch.ones(3)
    offload = Offload("policy", torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="cannot be released"):
        offload.offload("model", [mine, mapped])
    assert not parts_away(offload)
    assert mine.tolist() == [1.0, 1.0, 1.0]


def test_a_cleared_part_is_back_with_zeros() -> None:
    offload, tensor = Offload("policy", torch.device("cpu")), torch.ones(4)
    offload.clear("grad")
    assert torch.equal(tensor, torch.ones(4))
    offload.offload("grad", [tensor])
    offload.clear("grad")
    assert not parts_away(offload)
    assert torch.equal(tensor, torch.zeros(4))


def test_what_is_away_is_named_with_the_call_that_brings_it_back() -> None:
    offload, tensor = Offload("policy", torch.device("cpu")), torch.ones(3)
    offload.offload("optimizer", [tensor])
    offload.offload("grad", [])
    offload.require("forward_backward", "model")
    with pytest.raises(HandleError) as caught:
        offload.require("optimizer_step", "grad", "model", "optimizer")
    assert str(caught.value) == (
        "optimizer_step on 'policy' while its grad and optimizer is in host memory; call "
        'to(handle, "device", model=False, optimizer=True, grad=True) first'
    )
    assert caught.value.details == {"handle": "policy", "operation": "optimizer_step", "parts": ["grad", "optimizer"]}
    assert (host_bytes(offload, "optimizer"), host_bytes(offload, "grad"), host_bytes(offload, "model")) == (12, 0, 0)


def test_a_part_that_is_away_is_moved_once_and_one_that_is_forgotten_counts_as_there() -> None:
    offload, first, second = Offload("policy", torch.device("cpu")), torch.ones(3), torch.ones(5)
    offload.offload("model", [first])
    offload.offload("model", [second])
    assert host_bytes(offload, "model") == 12 and second.tolist() == [1.0] * 5
    offload.reload("grad")
    offload.forget("model")
    assert not parts_away(offload) and host_bytes(offload, "model") == 0
    assert first.untyped_storage().nbytes() == 0, "its contents are given up"
    offload.reload("model")
    assert first.untyped_storage().nbytes() == 0
    for _ in range(2):
        second.fill_(4.0)
        offload.offload("model", [second, second[1:]])
        offload.reload("model")
        assert second.tolist() == [4.0] * 5


_KEPT = """
import torch

from rl_backend.runtime.handle import Offload


def heap():
    maps = open("/proc/self/smaps").read().split("[heap]")[1].splitlines()
    return next(int(line.split()[1]) * 1024 for line in maps if line.startswith("Rss:"))


below, tensor, above = torch.ones(2**20), torch.ones(2**24), torch.ones(2**20)
offload, before = Offload("policy", torch.device("cpu")), heap()
assert before > 2**26, "the heap has the tensor"
offload.offload("model", [tensor])
assert heap() < before - 2**26 + 2**20, (before, heap())
offload.reload("model")
assert tensor.sum() == 2**24 and above.sum() == below.sum() == 2**20
"""


def test_the_system_gets_back_what_leaves_a_rank_that_keeps_freed_memory() -> None:
    environment = {**os.environ, **memory_environment()}
    ran = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, timeout=60, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("options", [{"forward_only": True}, {"trainable": False}], ids=str)
def test_all_parameters_of_a_model_that_is_not_trained_leave(runtime: NativeRuntime, options: dict[str, bool]) -> None:
    frozen = runtime.build_model(**options)
    size = sum(parameter.nbytes for parameter in frozen.parameters.values())
    assert device_bytes(frozen)["model"] >= size > 0
    runtime.to(frozen, "cpu", model=True, optimizer=False, grad=False)
    assert device_bytes(frozen)["model"] == 0
