"""Hidden states between the modules of a model, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl_backend.contracts import PackedBatch, UnsupportedError, stored_tensors
from rl_backend.parallel.collectives import all_gather
from rl_backend.parallel.context import gather_outputs
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.token_layout import TokenLayout
from rl_backend.runtime.module_outputs import record_outputs
from rl_backend.runtime.native.batch import lay_out
from rl_backend.runtime.native.forward_backward import run_micro_batches
from rl_backend.runtime.native.handle import NativeHandle


def record_activations(handle: NativeHandle, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
    """Runs checked micro-batches forward; see :meth:`rl_backend.runtime.Runtime.activations`.

    Raises:
        UnsupportedError: ``config.json`` has no ``hidden_size`` to know hidden states by.
    """
    hidden_size = handle.hf_config.get("hidden_size")
    if not isinstance(hidden_size, int):
        raise UnsupportedError(
            f"activations of {handle.name!r}: config.json has hidden_size={hidden_size!r}, by which hidden states are "
            "known; it must be a whole number",
            hidden_size=hidden_size,
        )
    hf_names = {
        parameter: tuple(stored for _, stored in stored_tensors(name)) for parameter, name in handle.weight_names.items()
    }
    activations: list[Mapping[str, Tensor]] = []
    for batch in data:
        with record_outputs(handle.model, hf_names, hidden_size) as outputs:
            run_micro_batches(handle, [batch], None, forward_only=True, keep_gathered=False)
        layout = lay_out(batch.to(handle.groups.device), handle.groups, 1).layout
        rows = batch.num_tokens if layout is None else layout.index.shape[0] // handle.groups.tp_group.size()
        whole = {
            path: _whole(output, layout, handle.groups)
            for path, output in outputs.items()
            if output.shape == (rows, hidden_size)
        }
        if handle.groups.replica_group.rank() == 0:
            activations.append({path: output.to("cpu", torch.float32) for path, output in whole.items()})
    return activations


def _whole(output: Tensor, layout: TokenLayout | None, groups: ParallelGroups) -> Tensor:
    """(rows between blocks, hidden_size) of this rank -> (T, hidden_size)."""
    if layout is None:
        return output
    return gather_outputs(all_gather(output, groups.tp_group, sum_gradients=False), layout, groups.cp_group)
