"""What a runtime that keeps its own models checks and does the same way, whatever trains them."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from rl_backend.contracts import HandleError, ModelHandle, RuntimeConfig
from rl_backend.runtime.base import Runtime
from rl_backend.runtime.checkpoint_writer import CheckpointWriter


@dataclass(eq=False, kw_only=True)
class HeldHandle[O](ModelHandle):
    """One model of a :class:`HeldRuntime`.

    Attributes:
        owner: the runtime that built it; None once it is closed.
        config: the runtime's, with the ``hf_path`` and optimizer of this model.
        hf_config: ``config.json``.
        optimizer: None for a forward-only handle.
        broken: why the handle cannot be used, empty when it can: a pass failed in the middle (until ``zero_grad``).
        damaged: why its weights cannot be trusted: a checkpoint failed in the middle of loading (until one loads).
    """

    owner: object | None
    config: RuntimeConfig
    hf_config: Mapping[str, Any]
    optimizer: O | None
    broken: str = ""
    damaged: str = ""

    @abstractmethod
    def roots(self) -> Iterable[nn.Module]:
        """The modules that the model consists of on this rank."""

    @abstractmethod
    def release(self) -> None:
        """Drops every tensor; the handle cannot be used again."""

    def trainer(self, operation: str) -> O:
        """The optimizer; raises :class:`HandleError` for a forward-only handle."""
        if self.optimizer is None:
            raise HandleError(
                f"{operation} on {self.name!r}, which is forward-only: it has no gradients and no optimizer; "
                "build it with build_model(forward_only=False)",
                handle=self.name,
                operation=operation,
            )
        return self.optimizer


class HeldRuntime[H: HeldHandle](Runtime[H]):
    """Keeps the handles that it built, refuses others, and frees them on ``close``."""

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config)
        self._handles: list[H] = []
        self._num_built = 0
        self._closed = False

    @abstractmethod
    def _close_groups(self) -> None:
        """Gives up the process groups, once no handle has tensors any more."""

    @contextmanager
    def train_mode(self, handle: H) -> Generator[None]:
        self._use(handle)
        handle.trainer("train_mode")
        with _mode(handle, True):
            yield

    @contextmanager
    def eval_mode(self, handle: H) -> Generator[None]:
        self._use(handle)
        with _mode(handle, False):
            yield

    def wait_for_checkpoint(self, handle: H) -> None:
        self._use(handle, damaged_too=True)
        self._writer.wait(handle)

    def checkpoint_is_pending(self, handle: H) -> bool:
        self._use(handle, damaged_too=True)
        return self._writer.is_pending(handle)

    def close(self) -> None:
        """Waits for an asynchronous save, then frees; raises that save's error at the end."""
        if self._closed:
            return
        try:
            self._writer.close()
        finally:
            self._closed = True
            for handle in self._handles:
                handle.release()
            self._handles.clear()
            self._close_groups()
            # Models are cycles of references; until they are collected, they keep memory and process groups their threads.
            gc.collect()

    def _open_writer(self, host_group: dist.ProcessGroup) -> None:
        self._writer = CheckpointWriter(host_group)

    def _name_model(self, name: str) -> str:
        """``name``, or one from the order of building."""
        self._num_built += 1
        return name or f"model-{self._num_built}"

    def _use(self, handle: H, *, damaged_too: bool = False) -> None:
        self._require_open()
        if not isinstance(handle, HeldHandle) or handle.owner is not self:
            raise HandleError(
                f"handle {getattr(handle, 'name', handle)!r} is closed or belongs to another runtime; use the runtime that "
                "built it"
            )
        if handle.damaged and not damaged_too:
            raise HandleError(f"{handle.name!r} has no usable weights: {handle.damaged}; load a complete checkpoint")

    def _require_open(self) -> None:
        if self._closed:
            raise HandleError("this runtime is closed; create another one")

    def _require_whole_gradients(self, handle: H, operation: str) -> None:
        if handle.broken:
            raise HandleError(f"{operation} on {handle.name!r}: {handle.broken}; call zero_grad first", handle=handle.name)


@contextmanager
def _mode(handle: HeldHandle, training: bool) -> Generator[None]:
    roots = list(handle.roots())
    before = [(module, module.training) for root in roots for module in root.modules()]
    for root in roots:
        root.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
