"""Running micro-batches through this rank's stages of a pipeline."""

from contextlib import AbstractContextManager
from functools import lru_cache, partial

import torch
from torch import Tensor

from rl_backend.contracts import ForwardResult, ModelOutput, text_config
from rl_backend.parallel import fsdp
from rl_backend.pipeline.catalog import make_schedule
from rl_backend.pipeline.executor import PipelineExecutor
from rl_backend.pipeline.measured import SPAN_NAMES, span_arguments
from rl_backend.pipeline.schedule import Action, Schedule
from rl_backend.pipeline.tied_weights import add_gradients_of_copies, drop_gradients_of_copies
from rl_backend.runtime.native.forward_backward import abandoned_on_error, lay_out
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import schedule_name
from rl_backend.runtime.native.routes import PassRoutes
from rl_backend.runtime.passes import PassRequest, PassResults
from rl_backend.trace.device import device_span


def run_pipeline(handle: NativeHandle, request: PassRequest) -> ForwardResult:
    """As :func:`~rl_backend.runtime.native.forward_backward.run_micro_batches`, with the configuration's schedule.

    Losses and metrics are on the ranks of the last stage, outputs on its source rank.

    Raises:
        BatchError: what the loss returned is not a 0-d tensor with a gradient, or a metric is not a number.
    """
    handle.num_passes += 1
    trains, options = not request.forward_only, handle.options
    schedule = _schedule(handle, len(request.data), forward_only=request.forward_only)
    work = _Stages(handle, request, schedule)
    for stage in handle.stages.values():
        fsdp.set_gradient_sync(stage, False, keep_gathered=not options.reshard_after_forward)
    with abandoned_on_error(handle, request.forward_only):
        if trains:
            drop_gradients_of_copies(handle.parameters, handle.stage_copies)
        with torch.set_grad_enabled(trains):
            PipelineExecutor(schedule, handle.groups.pp_group, work).run()
        if trains:
            for stage in handle.stages.values():
                fsdp.reduce_gradients(stage)
            work.loads.commit()
            add_gradients_of_copies(handle.parameters, handle.stage_copies, handle.groups.pp_group)
    return work.results.result(work.routes.outputs(request.data) if work.routes.recorded is not None else {})


_make_schedule = lru_cache(maxsize=32)(make_schedule)


def _schedule(handle: NativeHandle, num_micro_batches: int, *, forward_only: bool) -> Schedule:
    """The configuration's schedule for a number of micro-batches that it can do."""
    name, parallel = schedule_name(handle.options), handle.options.parallel
    assert name is not None, "a handle with stages has a schedule"
    return _make_schedule(name, parallel.pp, num_micro_batches, stages_per_rank=parallel.vpp, forward_only=forward_only)


class _Stages:
    """The computations of this rank's stages, and what the last one gave."""

    def __init__(self, handle: NativeHandle, request: PassRequest, schedule: Schedule) -> None:
        self._handle = handle
        self._schedule = schedule
        self._data = [batch.to(handle.groups.device) for batch in request.data]
        self.routes = routes = PassRoutes(handle, request.router_replay)
        self.loads = handle.pass_loads(forward_only=request.forward_only)
        self._rank_batches = [
            lay_out(
                batch,
                handle.groups,
                len(self._data),
                routes.replayed,
                partial(request.runs, index, batch),
                request.heads,
                handle.trains_second,
            )
            for index, batch in enumerate(self._data)
        ]
        self.results = PassResults(request, handle.groups.dp_group, handle.has_outputs)

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor | None:
        rank_batch = self._rank_batches[micro_batch]
        padding = rank_batch.inputs.padding
        with self.routes.forward(micro_batch, stage, rank_batch.layout), self.loads.forward(stage, padding):
            output: Tensor | ModelOutput = self._handle.stages[stage](rank_batch.inputs._replace(hidden=hidden))
        if isinstance(output, Tensor):
            return output
        output = rank_batch.outputs(output, self._handle.groups)
        return self.results.add(micro_batch, self._data[micro_batch], output)

    def empty_hidden(self, micro_batch: int) -> Tensor:
        inputs = self._rank_batches[micro_batch].inputs
        handle, rows = self._handle, inputs.input_ids.shape[0] // self._handle.groups.tp_group.size()
        dtype = getattr(torch, handle.options.param_dtype)
        return torch.empty(rows, text_config(handle.hf_config)["hidden_size"], dtype=dtype, device=handle.groups.device)

    def after_weights(self, stage: int) -> None:
        fsdp.accumulate_gradients(self._handle.stages[stage])

    def span(self, action: Action) -> AbstractContextManager[object]:
        handle, batch = self._handle, self._data[action.micro_batch]
        facts = span_arguments(
            action,
            schedule=self._schedule,
            pipeline=handle.groups.pipeline,
            rank=handle.groups.pp_group.rank(),
            model=handle.name,
            number=handle.num_passes,
        )
        work = {"tokens": batch.num_tokens, "sequences": batch.num_sequences}
        return device_span(handle.groups.device, SPAN_NAMES[action.kind], "micro_batch", **work, **facts)
