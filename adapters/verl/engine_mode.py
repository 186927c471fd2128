"""``train_mode`` and ``eval_mode`` of an engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Literal, Protocol

from verl.workers.engine.base import BaseEngineCtx

from adapters.verl.options.settings import EngineSettings


class EngineInModes(Protocol):
    """What a mode needs of :class:`~adapters.verl.engine.RuntimeEngine`."""

    settings: EngineSettings
    mode: str | None

    def runtime_mode(self, mode: Any) -> AbstractContextManager[None]: ...

    def move(self, where: Literal["cpu", "device"], *, model: bool, optimizer: bool, grad: bool) -> None: ...

    def optimizer_zero_grad(self) -> None: ...


class EngineMode(BaseEngineCtx):
    """Brings the engine's parts to the device, sets the mode, and undoes both. May nest: the outermost one undoes.

    Args:
        disable_auto_offload: leave the parts where they are.
        zero_grad_on_exit: drop gradients after training; after an error they are dropped in any case.
    """

    engine: EngineInModes

    def __init__(self, engine: EngineInModes, mode: str, **options: Any) -> None:
        super().__init__(engine, mode, **options)
        self._outer_mode: str | None = None
        self._undo = ExitStack()
        self._leaving = False

    def __enter__(self) -> None:
        self._outer_mode = self.engine.mode
        with ExitStack() as undo:
            undo.enter_context(self.engine.runtime_mode(self.mode))
            undo.callback(setattr, self.engine, "mode", self._outer_mode)
            super().__enter__()
            self._undo = undo.pop_all()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.close()
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        self._leaving = True
        super().__exit__(kind, error, trace)
        self.engine.mode = self._outer_mode

    def _context_switch(self, device: str) -> None:
        """verl names the device to go to, which on a CPU does not say whether parts are wanted or not any more."""
        if self.disable_auto_offload or (self._leaving and self._outer_mode is not None):
            return
        training, settings = self.mode == "train", self.engine.settings
        self.engine.move(
            "cpu" if self._leaving else "device",
            model=settings.param_offload,
            optimizer=training and settings.optimizer_offload,
            grad=training and settings.grad_offload,
        )
