"""Layout of GPT-NeoX over ranks."""

from __future__ import annotations

from torch import nn

from rl_backend import NativeConfig
from rl_backend.model.decoder import checkpoint_layers
from rl_backend.parallel.fsdp import apply_fsdp
from rl_backend.parallel.groups import ParallelGroups


def parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    layers = list(module.get_submodule("layers").children())
    checkpoint_layers(layers, config.activation_checkpointing)
    apply_fsdp(module, layers, groups, config)
