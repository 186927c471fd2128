"""Saving and loading a handle, now or in the background."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl_backend.checkpoint.agreement import raise_on_every_rank
from rl_backend.checkpoint.hf_critic import critic_config
from rl_backend.checkpoint.hf_writer import write_hf_directory
from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.training_state import (
    discard_directory,
    host_copy,
    open_training_state,
    read_training_state,
    reserve_directory,
    write_training_state,
)
from rl_backend.contracts import CheckpointError, ExportInterruptedError, UnsupportedError
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.runtime.native import export, fsdp_state
from rl_backend.runtime.native.handle import NativeHandle


@dataclass
class _BackgroundSave:
    handle: NativeHandle
    thread: threading.Thread
    errors: list[BaseException] = field(default_factory=list)


class CheckpointWriter:
    """Saves the handles of one runtime, one save at a time: all of them use the host group."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self._host_mesh = DeviceMesh.from_group(groups.host_group, "cpu", mesh_dim_names=("dp",))
        self._background: _BackgroundSave | None = None

    def wait(self, handle: NativeHandle | None = None) -> None:
        """Waits for the save in the background, or only for one of ``handle``, and raises its error."""
        background = self._background
        if background is None or (handle is not None and background.handle is not handle):
            return
        background.thread.join()
        self._background = None
        if background.errors:
            raise background.errors[0]

    def save_training_state(self, handle: NativeHandle, path: Path, *, asynchronous: bool) -> None:
        """Writes weights, moments, schedules and random state to ``path``."""
        handle.trainer("save_checkpoint of training state")
        self.wait()
        group = self._groups.host_group
        temporary = reserve_directory(path, group)
        tensors, manifest = _all_tensors(handle), _manifest(handle)
        if not asynchronous:
            write_training_state(temporary, path, tensors, manifest, group)
            return
        try:
            copies = host_copy(tensors, self._host_mesh)
        except BaseException:
            discard_directory(temporary, group)
            raise
        errors: list[BaseException] = []

        def write() -> None:
            try:
                write_training_state(temporary, path, copies, manifest, group)
            except BaseException as error:  # noqa: BLE001 - raised by wait() in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=write, name=f"checkpoint-{handle.name}", daemon=False)
        self._background = _BackgroundSave(handle, thread, errors)
        thread.start()

    def save_hf(self, handle: NativeHandle, path: Path, *, asynchronous: bool) -> None:
        """Writes a Hugging Face directory to ``path``; rank 0 writes what all ranks gather.

        Raises:
            UnsupportedError: asynchronous.
        """
        if asynchronous:
            raise UnsupportedError(
                "save_checkpoint(hf=True, asynchronous=True): a Hugging Face directory is written while the weights are "
                "gathered, so it cannot be left to the background; use asynchronous=False"
            )
        self.wait()
        group = self._groups.host_group
        writes = self._groups.dp_rank == 0
        raise_on_every_rank(_make_parent(path) if writes else None, group)
        stream = export.export_weights(
            handle.parameters, handle.weight_names, self._groups, dtype=None, byte_budget=None, only=None
        )
        problem: str | None = None
        cause: Exception | None = None
        try:
            if writes:
                config = critic_config(handle.hf_config) if handle.head == "values" else None
                write_hf_directory(path, stream, handle.config.hf_path, config=config)
            else:
                for _ in stream:
                    pass
        except ExportInterruptedError as error:
            # On the other ranks rank 0 could not write; its reason comes with the agreement below.
            problem, cause = (error.message, error) if writes else (None, None)
        except CheckpointError as error:
            problem, cause = error.message, error
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            problem, cause = f"writing {path} failed: {type(error).__name__}: {error}", error
        finally:
            stream.close()
        raise_on_every_rank(problem, group, cause)


def _make_parent(path: Path) -> str | None:
    if path.exists():
        return f"{path} exists; a checkpoint is written to a new directory, choose another path"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot make the directory of {path}: {error}"
    return None


def load_training_checkpoint(handle: NativeHandle, path: Path) -> None:
    """Restores a handle from ``path``; a forward-only one takes the weights and their version."""
    group = handle.groups.host_group
    manifest, saved_names = open_training_state(path, _model_type(handle), _shapes(handle), handle.head, group)
    tensors = _model_tensors(handle) if handle.optimizer is None else _all_tensors(handle)
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


def _all_tensors(handle: NativeHandle) -> dict[str, Tensor]:
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


def _manifest(handle: NativeHandle) -> TrainingManifest:
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
