"""Importing Megatron, with or without Transformer Engine."""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import logging
import sys
import types
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.bridge.checks import INSTALL, require_installed

NAMES = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
REMOVED = "transformers.modeling_attn_mask_utils"
"""What transformers 5.24 lacks and Megatron-Bridge 0.6 imports, for BailingMoeV2, which this runtime does not train."""


class _Placeholder(types.ModuleType):
    """A module whose classes can be subclassed and never be made, and whose functions cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not (name[0].isupper() or self.__name__ == REMOVED):
            raise AttributeError(name)
        package = self.__name__.partition(".pytorch")[0]

        def refuse(self: object, *args: object, **kwargs: object) -> None:
            raise ModuleNotFoundError(f"{name} needs {package}, which is not installed", name=package)

        placeholder = type(name, (nn.Module,), {"__init__": refuse})
        setattr(self, name, placeholder)
        return placeholder


@contextmanager
def placeholders() -> Generator[None]:
    """Makes Transformer Engine and :data:`REMOVED` importable inside; does nothing where they are installed."""
    # megatron.bridge.peft.lora_layers imports transformer_engine.pytorch at its top and subclasses two of its modules, but
    # makes instances only in a model with Transformer Engine's layers.
    missing = [] if importlib.util.find_spec(REMOVED) else [REMOVED]
    if importlib.util.find_spec("transformer_engine") is None:
        missing += NAMES
    modules = {name: _Placeholder(name) for name in missing}
    for name, module in modules.items():
        # Megatron-Core reads that of Transformer Engine; every feature asks for a later version.
        vars(module)["__version__"] = "0.0.0"
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


# Warnings of Megatron's code in every process that trains, about nothing that a user could change.
_REPEATED: tuple[tuple[str, type[Warning]], ...] = (
    (r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor` is deprecated", FutureWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),
)


def import_megatron() -> None:
    """Imports Megatron-Core, then Megatron-Bridge; raises :class:`UnsupportedError` with what to install."""
    require_installed()
    for message, category in _REPEATED:
        warnings.filterwarnings("ignore", message, category)
    load = torch.storage._load_from_bytes
    # Megatron-Core imports wandb where it is installed, whose folders in /tmp outlive ranks that are killed.
    with quiet(), hidden("wandb"):
        try:
            # First: it finds out by itself whether Transformer Engine is there.
            for name in ("models.gpt", "distributed", "optimizer", "pipeline_parallel"):
                importlib.import_module(f"megatron.core.{name}")
            with placeholders():
                importlib.import_module("megatron.bridge")
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"Megatron cannot be imported: the package {error.name!r} is missing; {INSTALL}", package=error.name
            ) from error
        finally:
            # Megatron-Core changes torch's pickles, which every process would need Megatron to read.
            torch.storage._load_from_bytes = load


@contextmanager
def hidden(package: str) -> Generator[None]:
    """Inside, a package counts as not installed; does nothing in a process that has imported it."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


@contextmanager
def quiet() -> Generator[None]:
    """Keeps Megatron's messages of an import or a build off the screen: optional packages, deprecations, counts."""
    # Megatron-Bridge's import also configures the root logger; that is undone.
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)


def has_transformer_engine() -> bool:
    """Whether the real Transformer Engine is installed. It needs CUDA."""
    return "transformer_engine" in sys.modules or importlib.util.find_spec("transformer_engine") is not None
