"""Bytes that autograd keeps for backward passes, counted while a model trains."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Inside, storages of saved tensors count from the first that is saved until the last is freed.

    Args:
        parameters: gives those that do not count, whenever it is asked.

    Attributes:
        peak: the most bytes at one time.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        super().__init__(self._pack, lambda saved: saved.tensor)
        self.live = self.peak = 0
        self._parameters = parameters
        self._users: Counter[int] = Counter()

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())
        storage = tensor.untyped_storage()
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if key not in {parameter.untyped_storage().data_ptr() for parameter in self._parameters()}:
            if not self._users[key]:
                self.live += nbytes
                self.peak = max(self.peak, self.live)
            self._users[key] += 1
            weakref.finalize(saved, self._release, key, nbytes)
        return saved

    def _release(self, key: int, nbytes: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self.live -= nbytes
