"""Host memory for copies of what a device holds."""

import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_backend.contracts import UnsupportedError

_ALIGNED = 64  # a multiple of the size of any element


class HostMemory:
    """One range of host memory for the copies of a set of tensors, kept from one copy to the next.

    It has the size of what is copied and is page-locked for a GPU, which then copies at the speed of the bus. torch's own
    page-locked memory is rounded up to powers of two for every tensor, up to twice as much, and a process keeps it for ever.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pages: mmap.mmap | bytes = b""
        self._unlock = weakref.finalize(self, _unlock, None)

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """(size,) uint8 for each of ``sizes``, valid until the next call; it gives them back before it takes more memory.

        Raises:
            UnsupportedError: the driver does not lock so much memory.
        """
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // _ALIGNED) * _ALIGNED)
        if places[-1] > len(self._pages):
            self._replace(places[-1])
        # Storages of their own: what writes a tensor to a file would copy one that is part of a larger storage.
        return [_bytes(self._pages, place, size) for place, size in zip(places, sizes, strict=False)]

    def _replace(self, nbytes: int) -> None:
        self._unlock()
        self._pages = b""
        # Pages of its own: two ranges that are locked must not share one.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._device.type == "cuda":
            data = _bytes(pages, 0, nbytes)
            if code := int(torch.cuda.cudart().cudaHostRegister(data.data_ptr(), nbytes, 0)):
                raise UnsupportedError(
                    f"{nbytes} bytes of host memory could not be page-locked (CUDA error {code}); free memory, or raise the "
                    "limit of locked memory (ulimit -l)"
                )
            # Unlocked before they are unmapped: it holds the tensor, and with it the pages.
            self._unlock = weakref.finalize(self, _unlock, data)
            # The driver unlocks what a process leaves.
            self._unlock.atexit = False
        self._pages = pages


def _bytes(pages: mmap.mmap | bytes, place: int, size: int) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=place)


def _unlock(data: Tensor | None) -> None:
    if data is not None:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(data.data_ptr())))
