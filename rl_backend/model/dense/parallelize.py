"""How a dense decoder is laid out over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from rl_backend.contracts import NativeConfig
from rl_backend.model.dense.model import DenseDecoder
from rl_backend.parallel.fsdp import apply_fsdp, checkpoint_layers

if TYPE_CHECKING:
    from rl_backend.parallel.groups import ParallelGroups


def parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    """Activation checkpointing and FSDP2, each layer a unit of its own and the rest with the root."""
    if not isinstance(module, DenseDecoder):
        raise TypeError(f"parallelize got a {type(module).__name__}; expected DenseDecoder")
    layers = list(module.layers)
    if config.activation_checkpointing == "full":
        checkpoint_layers(layers)
    apply_fsdp(module, layers, groups.mesh["dp"], config)
