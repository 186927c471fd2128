"""Hidden states between the modules of a model, gathered from all pipeline stages."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import PackedBatch
from rl_backend.runtime.bridge.batch import LaidOut
from rl_backend.runtime.bridge.build import hf_names
from rl_backend.runtime.bridge.forward_backward import run_micro_batches
from rl_backend.runtime.bridge.handle import BridgeHandle
from rl_backend.runtime.module_outputs import record_outputs


class ActivationRecorder:
    """Keeps what the modules of each chunk put out for each micro-batch."""

    def __init__(self, handle: BridgeHandle) -> None:
        self._handle = handle
        self._names = [_parameter_names(handle, index) for index in range(len(handle.chunks))]
        self.found: dict[tuple[int, int], dict[str, Tensor]] = {}
        """(micro-batch, stage of the whole model) -> path -> (T, hidden_size) float32 on the host."""

    @contextmanager
    def record(self, micro_batch: int, chunk: object, laid_out: LaidOut) -> Generator[None]:
        """Records the one forward pass of ``chunk`` in the context."""
        index = next(number for number, each in enumerate(self._handle.chunks) if each is chunk)
        groups = self._handle.groups
        stage = index * groups.parallel.pp + groups.pg.pp.rank()
        with record_outputs(self._handle.models[index], self._names[index], self._handle.provider.hidden_size) as outputs:
            yield
        packed = {path: self._pack(output, laid_out) for path, output in outputs.items()}
        self.found[micro_batch, stage] = {path: value for path, value in packed.items() if value is not None}

    def _pack(self, output: Tensor, laid_out: LaidOut) -> Tensor | None:
        """(columns, rows, H), or this rank's part of the columns -> (T, H); None for rows that are not tokens."""
        group, (rows, columns) = self._handle.groups.pg.tp, laid_out.shape
        if output.dim() != 3 or output.shape[1] != rows or output.shape[0] not in (columns, columns // group.size()):
            return None
        if output.shape[0] != columns:
            parts = [torch.empty_like(output) for _ in range(group.size())]
            dist.all_gather(parts, output.contiguous(), group=group)
            output = torch.cat(parts)
        return laid_out.pack(output).to("cpu", torch.float32)


def record_activations(handle: BridgeHandle, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
    """Runs checked micro-batches forward; see :meth:`rl_backend.runtime.Runtime.activations`."""
    recorder = ActivationRecorder(handle)
    run_micro_batches(handle, data, None, forward_only=True, observe=recorder.record)
    group = handle.groups.pg.pp
    stages: list[dict[tuple[int, int], dict[str, Tensor]]] = [{}] * group.size()
    dist.all_gather_object(stages, recorder.found, group=group)
    if not handle.groups.has_outputs:
        return []
    activations: list[dict[str, Tensor]] = [{} for _ in data]
    found = {key: outputs for stage in stages for key, outputs in stage.items()}
    for micro_batch, stage in sorted(found):
        activations[micro_batch] |= found[micro_batch, stage]
    return list(activations)


def _parameter_names(handle: BridgeHandle, chunk: int) -> dict[str, tuple[str, ...]]:
    """Name of a parameter in one of this rank's chunks -> its Hugging Face names."""
    return {
        task.param_name: hf_names(task)
        for conversion in handle.converter.conversions
        for task in conversion.tasks
        if task.megatron_module is not None and (task.vp_stage or 0) == chunk
    }
