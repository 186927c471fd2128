"""Sharding by FSDP2, the same for every model family."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from rl_backend.contracts import NativeConfig
from rl_backend.parallel.groups import ParallelGroups


def apply_fsdp(
    root: nn.Module,
    layers: Sequence[nn.Module],
    groups: ParallelGroups,
    config: NativeConfig,
    *,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Shards the parameters of ``experts``, of each layer, and then what is left in ``root``, over data parallelism.

    Parameters stay in their dtype (float32 masters) and are gathered in ``config.param_dtype``; gradients are reduced in
    ``config.reduce_dtype``: averaged over the data-parallel ranks, and added up over ranks that see parts of the same data.
    In one process and without a change of dtype, the model is left as it is: FSDP would only copy every parameter and
    gradient to and fro.

    The model must take and return tensors in tuples, NamedTuples, lists or dictionaries, where FSDP's hooks find them.

    Args:
        experts: modules whose parameters are laid out over ``groups.expert_mesh``: their copies are on other ranks than
            those of the rest.
    """
    param_dtype, reduce_dtype = getattr(torch, config.param_dtype), getattr(torch, config.reduce_dtype)
    if groups.world_size == 1 and all(_works_as_it_is(value, param_dtype, reduce_dtype) for value in root.parameters()):
        return
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for module in (*experts, *layers, root):
        mesh = groups.edp_mesh if module in experts else groups.fsdp_mesh
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=config.reshard_after_forward,
            shard_placement_fn=partial(_expert_placement, ranks=mesh.size()) if module in experts else None,
        )
        if mesh.size() != groups.dp_size:
            assert isinstance(module, FSDPModule), "fully_shard changed its type"
            module.set_gradient_divide_factor(float(groups.dp_size))
            # gloo has no reduction that multiplies. Where nothing is reduced, summing would divide a second time.
            module.set_force_sum_reduction_for_comms(mesh.size() > 1)


def _expert_placement(parameter: nn.Parameter, *, ranks: int) -> Shard | None:
    """Whole experts where every rank gets as many, else equal parts of each; FSDP takes unequal ones of dimension 0 only."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.shape[0] % ranks == 0:
        return None
    return next((Shard(dim) for dim in range(1, local.dim()) if local.shape[dim] % ranks == 0), None)


def _works_as_it_is(parameter: nn.Parameter, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> bool:
    return parameter.dtype == param_dtype and (not parameter.requires_grad or param_dtype == reduce_dtype)
