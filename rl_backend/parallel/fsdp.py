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
    the gathered parameters then outlive the recomputation. Layers must be deterministic: the state of the random number
    generators is not kept for the recomputation.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def apply_fsdp(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, config: NativeConfig) -> None:
    """Shards each layer's parameters, and then what is left in ``root``, over the one-dimensional ``mesh``.

    Parameters stay in their dtype (float32 masters) and are gathered in ``config.param_dtype``; gradients are reduced in
    ``config.reduce_dtype`` and averaged over the mesh. On one rank, where nothing is sharded, and without a change of
    dtype, the model is left as it is: FSDP would only copy every parameter and gradient to and fro.

    The model must take and return tensors in tuples, NamedTuples, lists or dictionaries, where FSDP's hooks find them.
    """
    param_dtype, reduce_dtype = getattr(torch, config.param_dtype), getattr(torch, config.reduce_dtype)
    if mesh.size() == 1 and all(_works_as_it_is(value, param_dtype, reduce_dtype) for value in root.parameters()):
        return
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)


def _works_as_it_is(parameter: nn.Parameter, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> bool:
    return parameter.dtype == param_dtype and (not parameter.requires_grad or param_dtype == reduce_dtype)
