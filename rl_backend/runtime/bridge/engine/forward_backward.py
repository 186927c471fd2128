"""Micro-batches through Megatron's pipeline schedules: losses, outputs and hidden states."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_backend.contracts import ForwardResult
from rl_backend.primitive.attention import Segments
from rl_backend.runtime.balance import PassLoads
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from rl_backend.runtime.bridge.model.conversion import hf_names
from rl_backend.runtime.bridge.model.output_heads import as_model_output
from rl_backend.runtime.bridge.passes.batch import LaidOut, lay_out_packed, lay_out_padded
from rl_backend.runtime.bridge.passes.routers import PassRoutes, counted
from rl_backend.runtime.passes import PassRequest, PassResults
from rl_backend.runtime.recording import gather_outputs_of_stages, gather_rows, record_outputs
from rl_backend.trace.device import device_span

# (micro-batch, number of the chunk, its tokens) -> a context around the forward pass of that chunk
type Observe = Callable[[int, int, LaidOut], AbstractContextManager[None]]
type ComputeLoss = Callable[[Tensor], tuple[Tensor, dict[str, Any]]]
type Shape = Sequence[int]

_NOTHING: Shape = (0, 0, 0)


def run_micro_batches(
    handle: BridgeHandle, request: PassRequest, *, observe: Observe = lambda *_: nullcontext()
) -> ForwardResult:
    """Runs checked micro-batches; Megatron reduces the gradients over the ranks at the end.

    Losses and metrics are on the ranks of the last stage, outputs on its source rank. Raises :class:`BatchError` for what a
    loss may not return.
    """
    data, groups = request.data, handle.groups
    laid_out = lay_out(handle, request)
    pp, vpp = groups.parallel.pp, groups.parallel.vpp
    results = PassResults(request, groups.dp_group, groups.has_outputs)
    schedule = get_forward_backward_func(pp_size=pp, vp_size=vpp if vpp > 1 else None)
    transfers = {} if pp == 1 else {"p2p_communicator": _transfers(handle, laid_out), "pg_collection": groups.pg}
    iterators = [iter(enumerate(laid_out)) for _ in handle.chunks]
    loads = handle.pass_loads(forward_only=request.forward_only)
    with PassRoutes(handle.routers, groups, request.router_replay) as routes:
        schedule(
            forward_step_func=_forward_step(handle, len(data), results, observe, routes, loads),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(handle.chunks) if len(handle.chunks) > 1 else handle.chunks[0],
            num_microbatches=len(data),
            # Buffers between stages hold the largest micro-batch.
            seq_length=max(each.shape[1] for each in laid_out),
            micro_batch_size=max(each.shape[0] for each in laid_out),
            forward_only=request.forward_only,
            **transfers,
        )
    loads.commit()
    return results.result(routes.outputs(data))


class KnownShapes(P2PCommunicator):
    """Megatron's transfers of one pass, without those of shapes: after each the host would wait for all work of the device.

    Args:
        shapes: of the hidden states of each micro-batch.
        num_chunks: model chunks of a rank.
    """

    def __init__(self, group: ProcessGroup, config: Any, shapes: Sequence[Shape], num_chunks: int) -> None:
        super().__init__(group, config)
        # Micro-batches in the order in which Megatron runs them through chunks, forward and, the chunks the other way round,
        # backward.
        table = get_schedule_table(len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage)
        self._activations = _received(table, shapes, begins=group.rank() == 0)
        self._gradients = _received(table, shapes, begins=group.rank() == group.size() - 1)

    def _communicate_shapes(self, _next: Any, _previous: Any, recv_prev: bool, recv_next: bool) -> tuple[Shape, Shape]:
        return next(self._activations) if recv_prev else _NOTHING, next(self._gradients) if recv_next else _NOTHING


def _received(table: Sequence[tuple[int, int]], shapes: Sequence[Shape], *, begins: bool) -> Iterator[Shape]:
    """Of what a rank receives; one that ``begins`` receives nothing for its first chunk."""
    return iter([shapes[micro_batch] for micro_batch, chunk in table if chunk or not begins])


def _transfers(handle: BridgeHandle, laid_out: Sequence[LaidOut]) -> KnownShapes:
    groups, provider = handle.groups, handle.provider
    parts = groups.parallel.tp if provider.sequence_parallel else 1
    shapes = [(columns // parts, rows, provider.hidden_size) for rows, columns in (each.shape for each in laid_out)]
    return KnownShapes(groups.pg.pp, get_model_config(handle.chunks[0]), shapes, len(handle.chunks))


def lay_out(handle: BridgeHandle, request: PassRequest) -> list[LaidOut]:
    groups, provider = handle.groups, handle.provider
    multiple = groups.parallel.tp if provider.sequence_parallel else 1
    mark_padding = provider.num_moe_experts is not None and (
        provider.moe_router_load_balancing_type != "none" or provider.moe_z_loss_coeff is not None
    )
    lay_out_batch = lay_out_packed if handle.packs_sequences else lay_out_padded
    found = []
    for index, each in enumerate(request.data):
        batch = each.to(groups.device)
        laid_out = lay_out_batch(batch, multiple, mark_padding=mark_padding)
        laid_out = replace(laid_out, heads=request.heads or (handle.head,))
        if request.adapters is not None:
            seq_lens = batch.seq_lens.tolist()
            segments = Segments.of_sequences(batch.cu_seqlens, seq_lens)
            laid_out = replace(laid_out, adapters=request.runs(index, batch, seq_lens), segments=segments)
        found.append(laid_out)
    return found


def _chunk_inputs(handle: BridgeHandle, chunk: Any, laid_out: LaidOut) -> Mapping[str, Any]:
    # Megatron splits the padding mask over sequence-parallel ranks on the first stage only; here also on the others.
    mask = laid_out.inputs.get("padding_mask")
    if mask is None or unwrap_model(chunk).pre_process:
        return laid_out.inputs
    group = handle.groups.pg.tp
    return {**laid_out.inputs, "padding_mask": mask.chunk(group.size(), dim=1)[group.rank()]}


def _forward_step(
    handle: BridgeHandle,
    num_micro_batches: int,
    results: PassResults,
    observe: Observe,
    routes: PassRoutes,
    loads: PassLoads,
) -> Callable[[Iterator[tuple[int, LaidOut]], Any], tuple[Tensor, ComputeLoss]]:
    """What Megatron's schedules call for each micro-batch and model chunk."""

    def step(iterator: Iterator[tuple[int, LaidOut]], chunk: Any) -> tuple[Tensor, ComputeLoss]:
        index, laid_out = next(iterator)
        number = next(number for number, each in enumerate(handle.chunks) if each is chunk)
        batch = laid_out.batch
        work = {"micro_batch": index, "tokens": batch.num_tokens, "sequences": batch.num_sequences}
        with (
            device_span(handle.groups.device, "forward", "micro_batch", **work),
            observe(index, number, laid_out),
            routes.forward(index, number, laid_out),
            counted(loads, number, laid_out, handle.groups.pg.tp),
            handle.adapters[number].forward(laid_out) if handle.adapters else nullcontext(),
        ):
            output = chunk(
                **_chunk_inputs(handle, chunk, laid_out),
                output_processor=handle.processor,
                output_processor_context=laid_out,
            )
            routes.before_backward(number, output)
            if laid_out.adapters:
                handle.adapters[number].before_backward(laid_out, output)

        def compute_loss(outputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
            loss = results.add(index, batch, as_model_output(outputs, laid_out))
            if loss is None:
                return outputs.new_zeros(()), {}
            # Megatron divides by the number of micro-batches; losses here are summed. A new tensor: it divides in place.
            return loss * num_micro_batches, {}

        return output, compute_loss

    return step


def record_activations(handle: BridgeHandle, request: PassRequest) -> list[Mapping[str, Tensor]]:
    """Runs checked micro-batches forward; see :meth:`rl_backend.runtime.Runtime.activations`."""
    groups = handle.groups
    pp_group, hidden_size = groups.pg.pp, handle.provider.hidden_size
    tasks = [task for conversion in handle.converter.conversions for task in conversion.tasks]
    # (micro-batch, stage of the whole model) -> path -> (T, hidden_size) float32 on the host
    here: dict[tuple[int, int], dict[str, Tensor]] = {}

    @contextmanager
    def record(micro_batch: int, chunk: int, laid_out: LaidOut) -> Generator[None]:
        names = {
            task.param_name: hf_names(task)
            for task in tasks
            if task.megatron_module is not None and (task.vp_stage or 0) == chunk
        }
        with record_outputs(handle.models[chunk], names, hidden_size) as outputs:
            yield
        packed = {path: _pack_output(output, laid_out, groups.pg.tp) for path, output in outputs.items()}
        stage = chunk * groups.parallel.pp + pp_group.rank()
        here[micro_batch, stage] = {path: value for path, value in packed.items() if value is not None}

    run_micro_batches(handle, request, observe=record)
    activations = gather_outputs_of_stages(here, len(request.data), pp_group)
    return list(activations) if groups.has_outputs else []


def _pack_output(output: Tensor, laid_out: LaidOut, tp_group: dist.ProcessGroup) -> Tensor | None:
    """(columns, rows, H), or this rank's part of the columns -> (T, H); None for rows that are not tokens."""
    rows, columns = laid_out.shape
    if output.dim() != 3 or output.shape[1] != rows or output.shape[0] not in (columns, columns // tp_group.size()):
        return None
    if output.shape[0] != columns:
        output = gather_rows(output, tp_group)
    return laid_out.pack(output).to("cpu", torch.float32)
