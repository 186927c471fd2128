"""What a native checkpoint holds, and loading one into any layout."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.pieces import TensorPieces
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.parallel.shards import local_region, local_tensor, owns
from rl_backend.runtime import held_state
from rl_backend.runtime.native import fsdp_state
from rl_backend.runtime.native.handle import NativeHandle


def load_training_checkpoint(handle: NativeHandle, path: Path) -> None:
    """Restores a handle from ``path``; a forward-only one takes the weights and their version."""

    def tensors() -> StateTensors:
        fsdp_state.reshard(handle.model)
        return _model_tensors(handle) if handle.optimizer is None else all_tensors(handle)

    manifest, loaded = held_state.load_state(handle, path, _shapes(handle), tensors, handle.groups.host_group)
    if handle.optimizer is not None:
        handle.optimizer.restore_schedule(manifest.schedule_steps)
        _drop_gradients(handle)
        held_state.restore_random_state(loaded, handle.groups.device)


def all_tensors(handle: NativeHandle) -> StateTensors:
    """Weights, moments and random state by name: pieces of whole tensors, whose names do not depend on the layout."""
    optimizer = handle.trainer("training state")
    state: dict[str, Tensor | TensorPieces] = {}
    for name, tensor in optimizer.state_tensors().items():
        kind, _, parameter = name.partition(".")
        state[f"optimizer.{name}"] = tensor if kind == "step" else _piece(handle.parameters[parameter], tensor)
    return {**_model_tensors(handle), **state, **held_state.random_state(handle.groups.device)}


def training_manifest(handle: NativeHandle) -> TrainingManifest:
    """Everything of the training state that is not a tensor."""
    return held_state.training_manifest(handle, _shapes(handle), handle.trainer("training state").schedule.num_steps)


def _model_tensors(handle: NativeHandle) -> dict[str, Tensor | TensorPieces]:
    return {f"model.{name}": _piece(parameter, parameter) for name, parameter in handle.parameters.items()}


def _piece(parameter: Tensor, tensor: Tensor) -> TensorPieces:
    """This rank's part of ``tensor``, which is laid out as ``parameter`` is."""
    local = local_tensor(tensor)
    offsets = tuple(part.start for part in local_region(parameter))
    return TensorPieces(parameter.shape, {offsets: local} if local.numel() else {}, writes=owns(parameter))


def _drop_gradients(handle: NativeHandle) -> None:
    for parameter in handle.parameters.values():
        parameter.grad = None
    fsdp_state.drop_unreduced_gradients(handle.model)
    handle.placement.forget("grad")


def _shapes(handle: NativeHandle) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in handle.parameters.items()}
