"""What a native checkpoint holds, and loading one into any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.pieces import TensorPieces
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.parallel.shards import local_region, local_tensor, owns
from rl_backend.runtime import held_state
from rl_backend.runtime.native import fsdp_state
from rl_backend.runtime.native.handle import NativeHandle

_STEPS = "optimizer.step"


def load_training_checkpoint(handle: NativeHandle, path: Path) -> None:
    """Restores a handle from ``path``; a forward-only one takes the weights and their version."""

    def tensors() -> StateTensors:
        fsdp_state.reshard(handle.model)
        return all_tensors(handle)

    manifest, loaded = held_state.load_state(handle, path, _shapes(handle), tensors, handle.groups.host_group)
    _fill_copies(handle)
    if handle.optimizer is not None:
        handle.optimizer.restore_schedule(manifest.schedule_steps)
        _drop_gradients(handle)
        held_state.restore_random_state(loaded, handle.groups.device)


def all_tensors(handle: NativeHandle) -> StateTensors:
    """Weights, moments and random state by name: pieces of whole tensors, whose names do not depend on the layout.

    Of a forward-only handle the weights.
    """
    tensors: dict[str, Tensor | TensorPieces] = {}
    for kind, name, tensor in _held_tensors(handle):
        original = handle.stage_copies.get(name, name)
        if original != name and original in handle.parameters:
            continue
        is_copy = original != name
        tensors[f"{kind}.{original}"] = tensor if kind == _STEPS else _piece(handle.parameters[name], tensor, is_copy)
    if handle.optimizer is not None:
        tensors |= held_state.random_state(handle.groups.device)
    return tensors


def training_manifest(handle: NativeHandle) -> TrainingManifest:
    """Everything of the training state that is not a tensor."""
    return held_state.training_manifest(handle, _shapes(handle), handle.trainer("training state").schedule.num_steps)


def _held_tensors(handle: NativeHandle) -> Iterator[tuple[str, str, Tensor]]:
    """(what it is, name of the parameter, tensor); all but step counts are laid out as the parameter is."""
    for name, parameter in handle.parameters.items():
        yield "model", name, parameter
    if handle.optimizer is not None:
        for key, tensor in handle.optimizer.state_tensors().items():
            kind, _, name = key.partition(".")
            yield f"optimizer.{kind}", name, tensor


def _piece(parameter: Tensor, tensor: Tensor, is_copy: bool) -> TensorPieces:
    local = local_tensor(tensor)
    offsets = tuple(part.start for part in local_region(parameter))
    pieces = {offsets: local} if local.numel() else {}
    return TensorPieces(parameter.shape, pieces, writes=owns(parameter) and not is_copy)


def _fill_copies(handle: NativeHandle) -> None:
    """From originals on the same rank; others have been read."""
    held = {(kind, name): local_tensor(tensor) for kind, name, tensor in _held_tensors(handle)}
    for (kind, name), local in held.items():
        original = handle.stage_copies.get(name)
        if original is not None and original in handle.parameters:
            local.copy_(held[kind, original])


def _drop_gradients(handle: NativeHandle) -> None:
    for parameter in handle.parameters.values():
        parameter.grad = None
    fsdp_state.drop_unreduced_gradients(handle.model)
    handle.placement.forget("grad")


def _shapes(handle: NativeHandle) -> dict[str, tuple[int, ...]]:
    return {name: layout.shards.shape for name, layout in handle.layouts.items()}
