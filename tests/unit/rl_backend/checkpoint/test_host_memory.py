"""Host memory: as much as asked for, locked for a GPU while it is there, and given back."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_backend.checkpoint.host_memory import HostMemory
from rl_backend.checkpoint.training_state import HostBuffers
from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.handle import Offload

CUDA = torch.device("cuda", 0)


class Driver:
    """What the driver is asked for, by the calls that this machine's torch would make; ``most`` bytes can be locked."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.locked: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert flags == 0 and pointer % mmap.PAGESIZE == 0
        self.calls += 1
        if sum(self.locked.values()) + nbytes > self.most:
            return 2
        self.locked[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802 - CUDA's name
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(first, 16) <= pointer < int(end, 16) for first, end in ranges), "unlocked before it is unmapped"
        del self.locked[pointer]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver(10**6)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "check_error", check)
    yield found
    assert not found.locked, "what was locked is unlocked"


def test_as_much_is_locked_as_asked_for_and_no_longer_than_it_is_used(driver: Driver) -> None:
    for sizes, locked in (([5], 64), ([1, 0, 64, 65], 256), ([600_000, 1], 600_064)):
        memory = HostMemory(CUDA)
        parts = memory.take(sizes)
        assert [part.nbytes for part in parts] == [part.untyped_storage().nbytes() for part in parts] == sizes
        assert list(driver.locked.values()) == [locked]
        assert all(part.data_ptr() % 64 == 0 for part in parts)
        parts[-1].fill_(7)
        del memory
        # Parts that are still read are still there.
        assert not driver.locked and set(parts[-1].tolist()) == {7}
    assert HostMemory(CUDA).take([0, 0])[1].nbytes == 0 and HostMemory(CUDA).take([]) == [] and driver.calls == 3
    refused = HostMemory(CUDA)
    with pytest.raises(UnsupportedError, match="1000064 bytes of host memory could not be page-locked"):
        refused.take([10**6 + 1])
    assert refused.take([3])[0].nbytes == 3 and list(driver.locked.values()) == [64]
    (plain,) = HostMemory(torch.device("cpu")).take([10**6 + 1])
    assert plain.nbytes == 10**6 + 1 and len(driver.locked) == 1


def test_a_range_is_used_again_and_replaced_by_a_larger_one_alone(driver: Driver) -> None:
    memory = HostMemory(CUDA)
    first = memory.take([100, 100])
    again = memory.take([200])
    assert [part.data_ptr() for part in (first[0], again[0])] == [next(iter(driver.locked))] * 2
    assert list(driver.locked.values()) == [256]
    driver.most = 300
    del first, again
    memory.take([150, 50])
    assert list(driver.locked.values()) == [256]
    driver.most = 400
    memory.take([300])
    assert list(driver.locked.values()) == [320], "the smaller range is given back first"


def offload_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Offload:
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return Offload("policy", CUDA)


def test_a_part_has_one_range_for_all_its_trips_and_gives_it_back_for_a_larger_one(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = offload_on_gpu(monkeypatch)
    tensors = [torch.arange(3.0), torch.arange(100_001, dtype=torch.uint8), torch.ones(())]
    for _ in range(3):
        offload.offload("optimizer", tensors)
        assert list(driver.locked.values()) == [64 + 100_032 + 64] and driver.calls == 1
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0]
        offload.reload("optimizer")
        assert tensors[0].tolist() == [0, 1, 2] and tensors[1].sum() == sum(i % 256 for i in range(100_001))
    # A part that is smaller this time, or not there, leaves it as it is.
    for some in (tensors[:1], []):
        offload.offload("optimizer", some)
        offload.forget("optimizer")
    assert driver.calls == 1
    driver.most = 200_064
    larger = torch.ones(200_001, dtype=torch.uint8)
    offload.offload("optimizer", [larger])
    assert list(driver.locked.values()) == [200_064], "the smaller range is given back first"
    offload.offload("grad", [])
    offload.reload("optimizer")
    assert larger.sum() == 200_001
    del offload


def test_on_a_cpu_nothing_is_kept_between_trips() -> None:
    offload, tensor = Offload("policy", torch.device("cpu")), torch.ones(5)
    for _ in range(2):
        offload.offload("grad", [tensor])
        assert offload._memory.keys() == {"grad"}
        offload.reload("grad")
        assert not offload._memory and tensor.tolist() == [1] * 5


def test_a_checkpoint_takes_as_much_as_the_state_has(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        """A tensor that says that it is on a GPU."""

        @property
        def device(self) -> Any:  # type: ignore[override]
            return CUDA

    waits: list[Any] = []
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waits.append(device))
    )
    state = {name: torch.arange(float(size)).as_subclass(OnGpu) for name, size in (("a", 3), ("b", 1025), ("step", 1))}
    buffers = HostBuffers(CUDA)
    for _ in range(2):
        copies = buffers.copy(state)
        assert all(torch.equal(torch.as_tensor(copies[name]), value) for name, value in state.items())
        assert list(driver.locked.values()) == [64 + 4160 + 64] and driver.calls == 1
    assert waits == [CUDA, CUDA]
