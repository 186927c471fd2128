"""Copies of a training state in host memory, in buffers that the next copy uses again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_backend.checkpoint.pieces import TensorPieces


class HostBuffers:
    """Host memory for one model's state; pinned for what is on a GPU, so that it is copied at the speed of the bus.

    It stays allocated from one copy to the next: memory that is touched for the first time takes several times as long to
    write to as memory that is there.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor | TensorPieces]) -> dict[str, Tensor | TensorPieces]:
        """Copies, valid until the next call. Pieces that another rank writes are left out."""
        devices = set[torch.device]()
        copies: dict[str, Tensor | TensorPieces] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorPieces):
                pieces = {
                    offsets: self._copied((name, offsets), piece, devices)
                    for offsets, piece in tensor.pieces.items()
                    if tensor.writes
                }
                copies[name] = TensorPieces(tensor.whole_size, pieces, writes=tensor.writes)
            else:
                copies[name] = self._copied((name, ()), tensor.detach(), devices)
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return copies

    def _copied(self, key: tuple[str, tuple[int, ...]], tensor: Tensor, devices: set[torch.device]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        if tensor.device.type != "cpu":
            devices.add(tensor.device)
        return buffer.copy_(tensor, non_blocking=True)
