"""Hidden states between the modules of a model, on the host."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from rl_backend.contracts import UnsupportedError, stored_tensors, text_config
from rl_backend.parallel.collectives import all_gather
from rl_backend.parallel.context import TokenLayout, gather_outputs
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.runtime.module_outputs import gather_outputs_of_stages, record_outputs
from rl_backend.runtime.native.forward_backward import lay_out, run_micro_batches
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.pipeline import run_pipeline
from rl_backend.runtime.passes import PassRequest


def record_activations(handle: NativeHandle, request: PassRequest) -> list[Mapping[str, Tensor]]:
    """Runs checked micro-batches forward; see :meth:`rl_backend.runtime.Runtime.activations`.

    Raises:
        UnsupportedError: ``config.json`` has no ``hidden_size`` to know hidden states by.
    """
    hidden_size = text_config(handle.hf_config).get("hidden_size")
    if not isinstance(hidden_size, int):
        raise UnsupportedError(
            f"activations of {handle.name!r}: config.json has hidden_size={hidden_size!r}, by which hidden states are "
            "known; it must be a whole number",
            hidden_size=hidden_size,
        )
    hf_names = {
        parameter: tuple(stored for _, stored in stored_tensors(handle.weight_names[parameter]))
        for parameter in handle.parameters
        if parameter not in handle.stage_copies
    }
    run = run_pipeline if handle.stages else run_micro_batches
    here: dict[tuple[int, int], dict[str, Tensor]] = {}
    for index, batch in enumerate(request.data):
        with ExitStack() as stack:
            recorded = {
                stage: stack.enter_context(record_outputs(module, hf_names, hidden_size))
                for stage, module in (handle.stages or {0: handle.model}).items()
            }
            run(handle, request._replace(data=[batch]))
        layout = lay_out(batch.to(handle.groups.device), handle.groups, 1).layout
        rows = batch.num_tokens if layout is None else layout.index.shape[0] // handle.groups.tp_group.size()
        for stage, outputs in recorded.items():
            here[index, stage] = {
                path: _whole(output, layout, handle.groups).to("cpu", torch.float32)
                for path, output in outputs.items()
                if output.shape == (rows, hidden_size)
            }
    activations = gather_outputs_of_stages(here, len(request.data), handle.groups.pp_group)
    return list(activations) if handle.has_outputs else []


def _whole(output: Tensor, layout: TokenLayout | None, groups: ParallelGroups) -> Tensor:
    """(rows between blocks, hidden_size) of this rank -> (T, hidden_size)."""
    if layout is None:
        return output
    return gather_outputs(all_gather(output, groups.tp_group, sum_gradients=False), layout, groups.cp_group)
