"""Placeholders for Transformer Engine, for the time of one import.

``megatron.bridge.peft.lora_layers`` imports ``transformer_engine.pytorch`` at its top and subclasses two of its modules, but
makes instances only in a model with Transformer Engine layers.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

NAMES = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")


class _Placeholder(types.ModuleType):
    """A module whose classes can be subclassed and never be made."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)

        def refuse(self: object, *args: object, **kwargs: object) -> None:
            raise ModuleNotFoundError(f"{name} needs Transformer Engine, which is not installed", name="transformer_engine")

        placeholder = type(name, (nn.Module,), {"__init__": refuse})
        setattr(self, name, placeholder)
        return placeholder


@contextmanager
def placeholders() -> Generator[None]:
    """Makes Transformer Engine importable inside; does nothing where it is installed."""
    if importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    modules = {name: _Placeholder(name) for name in NAMES}
    # Megatron-Core reads it; every feature asks for a later version.
    vars(modules["transformer_engine"])["__version__"] = "0.0.0"
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
