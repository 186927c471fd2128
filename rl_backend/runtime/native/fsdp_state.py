"""State of FSDP2 that the runtime changes beyond sharding. A model that is not an FSDP module needs none of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def set_gradient_sync(model: nn.Module, enabled: bool, *, keep_gathered: bool) -> None:
    """Whether the next backward pass reduces gradients over the ranks, or leaves them to a later one.

    Args:
        keep_gathered: without reduction, keep parameters gathered for the next micro-batch too.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_reshard_after_backward(enabled or not keep_gathered)


def accumulate_gradients(model: nn.Module) -> None:
    """Adds gradients of full parameters to those that wait for a reduction, in its dtype.

    FSDP2 does so at the end of a backward pass; gradients that are computed after theirs would otherwise add up in the dtype
    of the parameters, and it refuses to reduce gradients of two dtypes.
    """
    for module in _fsdp_modules(model):
        for group in _param_groups(module._get_fsdp_state()):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def reduce_gradients(model: nn.Module) -> None:
    """Reduces over the ranks what backward passes without reduction have left. A collective.

    FSDP2 has no public call for it, as gradients that are computed after their backward pass need.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model._get_fsdp_state()._root_post_backward_final_callback()


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters, so that the next forward pass gathers what the shards hold then."""
    for module in _fsdp_modules(model):
        module.reshard()


def abandon_step(model: nn.Module) -> None:
    """Forgets a forward or backward pass that an exception cut short, and gradients that no rank has reduced yet.

    FSDP2 has no public call for this: its hooks expect every forward to be followed by its backward.
    """
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
    for module in _fsdp_modules(model):
        for group in _param_groups(module._get_fsdp_state()):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _param_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
