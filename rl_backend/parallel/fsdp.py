"""Data parallelism by FSDP2, and activation checkpointing; the same for every model family."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from rl_backend.contracts import NativeConfig


def checkpoint_layers(layers: Sequence[nn.Module]) -> None:
    """Makes every layer keep only its inputs and compute the rest again in the backward pass.

    Wraps each layer's ``forward`` in place, so that parameter names stay as they are. Call it before :func:`apply_fsdp`:
    the gathered parameters then outlive the recomputation.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def apply_fsdp(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, config: NativeConfig) -> None:
    """Shards each layer's parameters, and then what is left in ``root``, over the one-dimensional ``mesh``.

    Parameters stay in their dtype (float32 masters) and are gathered in ``config.param_dtype``; gradients are reduced in
    ``config.reduce_dtype`` and averaged over the mesh.

    A model that takes or returns tensors inside other containers than tuples, NamedTuples, lists and dictionaries would
    bypass FSDP's hooks.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
        cast_forward_inputs=False,
    )
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
