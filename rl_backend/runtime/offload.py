"""Moving a handle's parts to host memory and back.

A part is moved by emptying and refilling the storages of its tensors: every tensor object, view and alias (FSDP's flat
shards, Megatron's buffers, the optimizer's references) stays valid, so nothing is rebuilt and results are bit-identical. On
a CPU runtime it works the same way, with host buffers as the other side; it saves no memory there.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_backend.contracts import HandleError, UnsupportedError
from rl_backend.contracts.atoms import PARTS, Part

type MovedStorage = tuple[torch.UntypedStorage, Tensor]
"""A storage that is empty, and its contents in host memory."""


@dataclass
class Offload:
    """Where the parts of one handle are.

    Host buffers are pinned for a CUDA device, and kept for the next trip.
    """

    handle_name: str
    device: torch.device
    _moved: dict[Part, list[MovedStorage]] = field(default_factory=dict)
    _spare_buffers: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def on_device(self, part: Part) -> bool:
        return part not in self._moved

    def require(self, operation: str, *parts: Part) -> None:
        """Raises :class:`HandleError` when one of ``parts`` is in host memory."""
        away = [part for part in parts if part in self._moved]
        if away:
            arguments = ", ".join(f"{part}={part in away}" for part in PARTS)
            raise HandleError(
                f"{operation} on {self.handle_name!r} while its {' and '.join(away)} is in host memory; call "
                f'to(handle, "device", {arguments}) first',
                handle=self.handle_name,
                operation=operation,
                parts=away,
            )

    def host_bytes(self, part: Part) -> int:
        """Bytes of ``part`` that are in host memory now."""
        return sum(host.nbytes for _, host in self._moved.get(part, ()))

    def offload(self, part: Part, tensors: Iterable[Tensor]) -> None:
        """Moves the storages of ``tensors`` to host memory; nothing to do when the part is there already."""
        if part in self._moved:
            return
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        fixed = [storage for storage in storages.values() if storage.nbytes() and not storage.resizable()]
        if fixed:
            raise UnsupportedError(
                f"{len(fixed)} tensors of the {part} of {self.handle_name!r} have memory that cannot be released "
                "(mapped from a file or shared with another library), so they cannot be moved to host memory"
            )
        moved = []
        for storage in storages.values():
            host = self._take_buffer(storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            moved.append((storage, host))
        self._synchronize()
        for storage, _ in moved:
            storage.resize_(0)
        self._moved[part] = moved
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload(self, part: Part) -> None:
        """Moves a part back to the training device; nothing to do when it is there.

        When that fails, as it does without enough memory, the whole part is still in host memory.
        """
        moved = self._moved.get(part, [])
        try:
            for storage, host in moved:
                storage.resize_(host.nbytes)
                _bytes(storage).copy_(host, non_blocking=True)
            self._synchronize()
        except BaseException:
            for storage, _ in moved:
                storage.resize_(0)
            raise
        self._moved.pop(part, None)
        self._keep_buffers(moved)

    def forget(self, part: Part) -> None:
        """Gives up the contents of a part whose tensors are being dropped; it counts as on the device again."""
        self._keep_buffers(self._moved.pop(part, []))

    def clear(self, part: Part) -> None:
        """Brings a part back filled with zeros; nothing to do when it is on the device."""
        for storage, host in self._moved.get(part, ()):
            storage.resize_(host.nbytes)
            _bytes(storage).zero_()
        self.forget(part)

    def _take_buffer(self, nbytes: int) -> Tensor:
        spare = self._spare_buffers[nbytes]
        return spare.pop() if spare else torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _keep_buffers(self, moved: list[MovedStorage]) -> None:
        if self.device.type == "cuda":
            for _, host in moved:
                self._spare_buffers[host.nbytes].append(host)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
