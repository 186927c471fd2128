"""FSDP2 sharding of any model family, and its state that a runtime changes between passes (of other modules nothing)."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Shard

from rl_backend.contracts import NativeConfig
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.float32 import KeptInFloat32, kept_ends


def apply_fsdp(
    root: nn.Module,
    layers: Sequence[nn.Module],
    groups: ParallelGroups,
    config: NativeConfig,
    *,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Shards the parameters of ``experts``, of each layer, and then what is left in ``root``, over data parallelism.

    Parameters stay in their dtype (float32 masters) and are gathered in ``config.param_dtype``, those of
    :class:`~rl_backend.primitive.float32.KeptInFloat32` by themselves and as they are, and so those of ``root`` where it
    :func:`keeps its ends <rl_backend.primitive.float32.kept_ends>`; gradients are reduced in ``config.reduce_dtype``:
    averaged over the data-parallel ranks, and added up over ranks that see parts of the same data.

    The model must take and return tensors in tuples, NamedTuples, lists or dictionaries, where FSDP's hooks find them.
    """
    param_dtype, reduce_dtype = getattr(torch, config.param_dtype), getattr(torch, config.reduce_dtype)
    # In one process and without a change of dtype FSDP would only copy every parameter and gradient to and fro.
    if groups.world_size == 1 and all(_works_as_it_is(value, param_dtype, reduce_dtype) for value in root.parameters()):
        return
    rounded = param_dtype.itemsize < torch.float32.itemsize
    unrounded = [part for part in root.modules() if rounded and isinstance(part, KeptInFloat32)]
    as_they_are = [*unrounded, root] if kept_ends(root) else unrounded
    for module in (*experts, *unrounded, *layers, root):
        mesh = groups.edp_mesh if module in experts else groups.fsdp_mesh
        dtype = torch.float32 if module in as_they_are else param_dtype
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False),
            reshard_after_forward=config.reshard_after_forward,
            shard_placement_fn=partial(_expert_placement, ranks=mesh.size()) if module in experts else None,
        )
        if mesh.size() != groups.dp_size:
            assert isinstance(module, FSDPModule), "fully_shard changed its type"
            module.set_gradient_divide_factor(float(groups.dp_size))
            # gloo has no reduction that multiplies. Where nothing is reduced, summing would divide a second time.
            module.set_force_sum_reduction_for_comms(mesh.size() > 1)


def _expert_placement(parameter: nn.Parameter, *, ranks: int) -> Shard | None:
    # Whole experts where every rank gets as many, else equal parts of each: FSDP takes unequal ones of dimension 0 only.
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.shape[0] % ranks == 0:
        return None
    return next((Shard(dim) for dim in range(1, local.dim()) if local.shape[dim] % ranks == 0), None)


def _works_as_it_is(parameter: nn.Parameter, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> bool:
    return parameter.dtype == param_dtype and (not parameter.requires_grad or param_dtype == reduce_dtype)


def set_backward(model: nn.Module, *, reduce: bool, reshard: bool) -> None:
    """Whether backward passes from now on reduce gradients over the ranks, or leave whole ones to a later pass; and whether
    they free gathered parameters, or keep them for the next micro-batch.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
        model.set_reshard_after_backward(reshard)


def accumulate_gradients(model: nn.Module) -> None:
    """Adds gradients of full parameters to those that wait for a reduction, in its dtype."""
    # FSDP2 does so at the end of a backward pass only; gradients that are computed later would add up in the dtype of the
    # parameters, and it refuses to reduce gradients of two dtypes.
    for parameter in fsdp_parameters(model):
        if hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def reduce_gradients(model: nn.Module) -> None:
    """Reduces over the ranks what backward passes without reduction have left. A collective."""
    if isinstance(model, FSDPModule):
        set_backward(model, reduce=True, reshard=True)
        # FSDP2 has no public call for it, as gradients that are computed after their backward pass need.
        model._get_fsdp_state()._root_post_backward_final_callback()


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters, so that the next forward pass gathers what the shards hold then."""
    for module in _fsdp_modules(model):
        module.reshard()


def abandon_step(model: nn.Module) -> None:
    """Forgets a forward or backward pass that an exception cut short, and gradients that no rank has reduced yet."""
    # FSDP2 has no public call for this: its hooks expect every forward to be followed by its backward.
    for module in _fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        if state._is_root is None:
            # Its first forward pass has not begun.
            continue
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        for group in _param_groups(state):
            group._training_state = TrainingState.IDLE
            group.wait_for_unshard()
            group._post_forward_indices.clear()
        module.reshard()
    drop_unreduced_gradients(model)


def drop_unreduced_gradients(model: nn.Module) -> None:
    """Drops gradients of full parameters that wait for a backward pass with reduction."""
    for parameter in fsdp_parameters(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own records of parameters: the shard of each, and the full parameter and gradient while there are any."""
    for module in _fsdp_modules(model):
        for group in _param_groups(module._get_fsdp_state()):
            yield from group.fsdp_params


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _param_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
