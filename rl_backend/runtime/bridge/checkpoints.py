"""What a bridge checkpoint holds, and loading one into any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.pieces import TensorPieces
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.runtime import held_state
from rl_backend.runtime.bridge.export import finish_parameter_gathers
from rl_backend.runtime.bridge.handle import BridgeHandle
from rl_backend.runtime.bridge.optimizer_state import num_steps, parameter_states, set_num_steps
from rl_backend.runtime.bridge.sharding import Placed, pieces_of, placed_tensors

_STEPS = "optimizer.step"


def all_tensors(handle: BridgeHandle) -> StateTensors:
    """Weights, masters, moments and random state by name.

    Weights and what the optimizer holds for them are pieces of whole tensors under Megatron's names, which do not depend on
    the layout. In float32 the masters are the weights, and are there once.
    """
    optimizer = handle.trainer("training state")
    finish_parameter_gathers(handle)
    placed = placed_tensors(handle.models)
    return {
        **_model_tensors(placed),
        **_optimizer_tensors(placed, optimizer.megatron),
        _STEPS: torch.tensor(float(num_steps(optimizer.megatron))),
        **_random_state(handle),
    }


def training_manifest(handle: BridgeHandle) -> TrainingManifest:
    """Everything of the training state that is not a tensor."""
    return held_state.training_manifest(handle, _shapes(handle), handle.trainer("training state").num_schedule_steps)


def load_training_checkpoint(handle: BridgeHandle, path: Path) -> None:
    """Restores a handle from ``path``; a forward-only one takes the weights and their version. Gradients are left alone."""

    def tensors() -> StateTensors:
        return all_tensors(handle) if handle.optimizer else _model_tensors(placed_tensors(handle.models))

    def problem(manifest: TrainingManifest) -> str | None:
        return _other_dtype(handle, manifest, path) if handle.optimizer else None

    group = handle.groups.host_group
    manifest, loaded = held_state.load_state(handle, path, _shapes(handle), tensors, group, problem=problem)
    if handle.optimizer is not None:
        steps = loaded[_STEPS]
        assert isinstance(steps, Tensor), "the step count is saved whole"
        set_num_steps(handle.optimizer.megatron, int(steps.item()))
        handle.optimizer.restore_schedule(manifest.schedule_steps)
        _restore_random_state(handle, loaded)


def _model_tensors(placed: list[Placed]) -> StateTensors:
    flat = {id(each.tensor): (0, each.tensor.numel(), each.tensor.detach().view(-1)) for each in placed}
    return {f"model.{key}": pieces for key, pieces in pieces_of(placed, flat).items()}


def _optimizer_tensors(placed: list[Placed], megatron: Any) -> StateTensors:
    states = list(parameter_states(megatron))
    tensors: dict[str, TensorPieces] = {}
    for name in ("param", "exp_avg", "exp_avg_sq"):
        flat = {
            id(state.parameter): (state.start, state.end, state.tensors[name].detach())
            for state in states
            if name != "param" or state.parameter.dtype != torch.float32
        }
        tensors |= {f"optimizer.{name}.{key}": pieces for key, pieces in pieces_of(placed, flat).items()}
    return tensors


def _random_state(handle: BridgeHandle) -> dict[str, Tensor]:
    """States of torch's generators and of Megatron's under names that no two ranks share."""
    states = held_state.random_state(handle.groups.device)
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[_tracked(name)] = _bytes(state)
    return states


def _restore_random_state(handle: BridgeHandle, tensors: StateTensors) -> None:
    held_state.restore_random_state(tensors, handle.groups.device)
    tracker = get_cuda_rng_tracker()
    ours = tracker.get_states()
    for name, state in ours.items():
        saved = tensors.get(_tracked(name))
        if isinstance(saved, Tensor):
            ours[name] = state.set_state(saved) if isinstance(state, torch.Generator) else saved
    tracker.set_states(ours)


def _tracked(name: str) -> str:
    return f"{held_state.RANDOM}megatron.{name}.{torch.distributed.get_rank()}"


def _bytes(state: Tensor | torch.Generator) -> Tensor:
    """With graph-safe random numbers Megatron keeps generators in the place of their states."""
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def _other_dtype(handle: BridgeHandle, manifest: TrainingManifest, path: Path) -> str | None:
    saved, here = manifest.runtime_config["backend_cfg"]["param_dtype"], handle.options.param_dtype
    if saved == here:
        return None
    return (
        f"{path} was written with param_dtype={saved!r}, this run has param_dtype={here!r}: the optimizer's masters would "
        "be missing or rounded; load it with the same param_dtype, or into a forward-only model"
    )


def _shapes(handle: BridgeHandle) -> dict[str, tuple[int, ...]]:
    return {name: shape for conversion in handle.converter.conversions for name, shape in conversion.shapes.items()}
