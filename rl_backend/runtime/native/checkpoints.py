"""What a native checkpoint holds, and loading one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.training_state import open_training_state, read_training_state
from rl_backend.runtime.native import fsdp_state
from rl_backend.runtime.native.handle import NativeHandle


def load_training_checkpoint(handle: NativeHandle, path: Path) -> None:
    """Restores a handle from ``path``; a forward-only one takes the weights and their version."""
    group = handle.groups.host_group
    manifest, saved_names = open_training_state(
        path, handle.config.backend, _model_type(handle), _shapes(handle), handle.head, group
    )
    tensors = _model_tensors(handle) if handle.optimizer is None else all_tensors(handle)
    random_state = _random_state(handle) if handle.optimizer is not None else {}
    wanted = {name: value for name, value in tensors.items() if name in saved_names or name not in random_state}
    fsdp_state.reshard(handle.model)
    try:
        read_training_state(path, wanted, group)
    except BaseException:
        handle.damaged = f"loading {path} failed in the middle"
        raise
    handle.damaged = handle.broken = ""
    handle.weight_version = manifest.weight_version
    if handle.optimizer is not None:
        handle.optimizer.restore_schedule(manifest.schedule_steps)
        _drop_gradients(handle)
        _restore_random_state(handle, wanted)


def all_tensors(handle: NativeHandle) -> dict[str, Tensor]:
    """Weights, moments and random state by name."""
    optimizer = handle.trainer("training state")
    return {
        **_model_tensors(handle),
        **{f"optimizer.{name}": tensor for name, tensor in optimizer.state_tensors().items()},
        **_random_state(handle),
    }


def _model_tensors(handle: NativeHandle) -> dict[str, Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in handle.parameters.items()}


def _random_state(handle: NativeHandle) -> dict[str, Tensor]:
    """States of torch's generators under names that no two ranks share."""
    states = {f"random.cpu.{handle.data_parallel_rank}": torch.get_rng_state()}
    if handle.groups.device.type == "cuda":
        states[f"random.cuda.{handle.data_parallel_rank}"] = torch.cuda.get_rng_state(handle.groups.device)
    return states


def _restore_random_state(handle: NativeHandle, tensors: dict[str, Tensor]) -> None:
    rank = handle.data_parallel_rank
    if f"random.cpu.{rank}" in tensors:
        torch.set_rng_state(tensors[f"random.cpu.{rank}"])
    if f"random.cuda.{rank}" in tensors:
        torch.cuda.set_rng_state(tensors[f"random.cuda.{rank}"], handle.groups.device)


def _drop_gradients(handle: NativeHandle) -> None:
    for parameter in handle.parameters.values():
        parameter.grad = None
    fsdp_state.drop_unreduced_gradients(handle.model)
    handle.placement.forget("grad")


def training_manifest(handle: NativeHandle) -> TrainingManifest:
    """Everything of the training state that is not a tensor."""
    return TrainingManifest(
        model_type=_model_type(handle),
        parameters=_shapes(handle),
        head=handle.head,
        weight_version=handle.weight_version,
        schedule_steps=handle.trainer("training state").schedule.num_steps,
        world_size=handle.data_parallel_size,
        runtime_config=handle.config.model_dump(mode="json"),
    )


def _model_type(handle: NativeHandle) -> str:
    return str(handle.hf_config.get("model_type"))


def _shapes(handle: NativeHandle) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in handle.parameters.items()}
