"""How dense Qwen3 is laid out over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from rl_backend.contracts import NativeConfig
from rl_backend.model.qwen3.model import Qwen3
from rl_backend.parallel.fsdp import apply_fsdp, checkpoint_layers

if TYPE_CHECKING:
    from rl_backend.parallel.groups import ParallelGroups


def parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    """Activation checkpointing and FSDP2, each layer a unit of its own and the rest with the root."""
    if not isinstance(module, Qwen3):
        raise TypeError(f"parallelize got a {type(module).__name__}; expected Qwen3")
    layers = list(module.layers)
    if config.activation_checkpointing == "full":
        checkpoint_layers(layers)
    apply_fsdp(module, layers, groups.mesh["dp"], config)
