"""Micro-batches laid out over the ranks, and run forward and backward."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rl_backend.contracts import ForwardResult, Head, ModelOutput, PackedBatch, RoutedLayers
from rl_backend.contracts.indexed_keys import KEYS
from rl_backend.model import ModelInput
from rl_backend.model.input import SecondTokens, second_labels
from rl_backend.parallel import fsdp
from rl_backend.parallel.context import TokenLayout, gather_outputs, lay_out_tokens
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.adapter_runs import AdapterRun
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.router import RowSequences
from rl_backend.runtime.native.balance import PassLoads
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.routes import PassRoutes
from rl_backend.runtime.passes import PassRequest, PassResults
from rl_backend.runtime.router_replay import routes_to_replay
from rl_backend.trace.device import device_span


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of a micro-batch of T tokens.

    Attributes:
        inputs: what the model takes: N tokens.
        layout: which of the T these are; None where they are all, in their order.
    """

    inputs: ModelInput
    layout: TokenLayout | None

    def outputs(self, output: ModelOutput, groups: ParallelGroups) -> ModelOutput:
        """(N,) of this rank -> (T,) in the batch's order, the same on every rank of a replica."""
        if self.layout is None:
            return output
        layout = self.layout
        gathered = {
            name: gather_outputs(value, layout, groups.cp_group)
            for name, value in output._asdict().items()
            if value is not None
        }
        return output._replace(**gathered)


def lay_out(
    batch: PackedBatch,
    groups: ParallelGroups,
    num_micro_batches: int,
    replayed: RoutedLayers | None = None,
    runs: Callable[[Sequence[int]], tuple[AdapterRun, ...]] = lambda sequence_rows: (),
    heads: Sequence[Head] = (),
    trains_second: bool = False,
) -> RankBatch:
    """The part of ``batch``, which is on the training device, that this rank has under context and tensor parallelism.

    Args:
        replayed: the model's layers with experts, where these must take the routes of the batch.
        runs: rows of each sequence on this rank -> the adapters that work on them.
        heads: as in ``ModelInput``.
        trains_second: whether the model is trained on the tokens after the next.
    """
    seq_lens = tuple(batch.seq_lens.tolist())
    routes = None if replayed is None else routes_to_replay(batch, replayed)
    keys = batch.token_fields.get(KEYS)
    second = None
    if trains_second:
        second = SecondTokens(second_labels(batch.labels), sum(max(length - 2, 0) for length in seq_lens))
    common = {
        "longest": max(seq_lens),
        "calculate_entropy": bool(batch.meta.get("calculate_entropy", False)),
        "router_loss_weight": 1.0 / num_micro_batches,
        "heads": heads,
    }
    if groups.token_group.size() == 1:
        inputs = ModelInput(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            segments=Segments.of_sequences(batch.cu_seqlens, seq_lens),
            labels=batch.labels,
            temperature=batch.temperature,
            padding=None,
            routes=routes,
            keys=keys,
            sequences=RowSequences(batch.sequence_ids, len(seq_lens)),
            adapters=runs(seq_lens),
            second=second,
            **common,
        )
        return RankBatch(inputs, None)
    layout = lay_out_tokens(
        seq_lens,
        cp_size=groups.cp_group.size(),
        cp_rank=groups.cp_group.rank(),
        multiple=groups.tp_group.size(),
        device=groups.device,
    )
    temperature = batch.temperature
    inputs = ModelInput(
        input_ids=layout.take(batch.input_ids, 0),
        position_ids=layout.position_ids,
        segments=layout.segments,
        labels=layout.take(batch.labels, -100),
        temperature=layout.take(temperature, 1.0) if isinstance(temperature, Tensor) else temperature,
        padding=_own_tokens(layout.padding, groups),
        routes=_own_tokens(None if routes is None else layout.take(routes, -1), groups),
        keys=None if keys is None else layout.take(keys, -1),
        sequences=RowSequences(_share(layout.take(batch.sequence_ids, 0), groups), len(seq_lens)),
        adapters=runs(layout.sequence_rows),
        second=None if second is None else second._replace(labels=layout.take(second.labels, -100)),
        **common,
    )
    return RankBatch(inputs, layout)


def _own_tokens(rows: Tensor | None, groups: ParallelGroups) -> Tensor | None:
    """As :func:`_share`, of rows that there may be."""
    return None if rows is None else _share(rows, groups)


def _share(rows: Tensor, groups: ParallelGroups) -> Tensor:
    """The rows between blocks, where tensor-parallel ranks share the tokens out."""
    return torch.tensor_split(rows, groups.tp_group.size())[groups.tp_group.rank()]


def run_micro_batches(handle: NativeHandle, request: PassRequest) -> ForwardResult:
    """Runs checked micro-batches; gradients are reduced over the ranks once, in the last backward pass.

    Raises:
        BatchError: what the loss returned is not a 0-d tensor with a gradient, or a metric is not a number.
    """
    data, forward_only = request.data, request.forward_only
    routes = PassRoutes(handle, request.router_replay)
    loads = handle.pass_loads(forward_only=forward_only)
    results = PassResults(request, handle.groups.dp_group, handle.has_outputs)
    with abandoned_on_error(handle, forward_only):
        for index in range(len(data)):
            if not forward_only:
                keep_gathered = not handle.options.reshard_after_forward
                fsdp.set_gradient_sync(handle.model, index == len(data) - 1, keep_gathered=keep_gathered)
            _run_one(handle, request, index, routes, loads, results)
    loads.commit()
    return results.result(routes.outputs(data) if routes.recorded is not None else {})


@contextmanager
def abandoned_on_error(handle: NativeHandle, forward_only: bool) -> Generator[None]:
    """Around the passes of one ``forward_backward``: leaves FSDP ready for the next, even after an error in the middle."""
    try:
        yield
    except BaseException:
        fsdp.abandon_step(handle.model)
        if not forward_only:
            handle.broken = "forward_backward raised an error in the middle, so its gradients are incomplete"
        raise
    fsdp.reshard(handle.model)


def _run_one(
    handle: NativeHandle, request: PassRequest, index: int, routes: PassRoutes, loads: PassLoads, results: PassResults
) -> None:
    # A function of its own, so that nothing of a micro-batch outlives it.
    device = handle.groups.device
    batch = request.data[index].to(device)
    work = {"micro_batch": index, "tokens": batch.num_tokens, "sequences": batch.num_sequences}
    with torch.set_grad_enabled(not request.forward_only), device_span(device, "forward", "micro_batch", **work):
        runs = partial(request.runs, index, batch)
        rank_batch = lay_out(
            batch, handle.groups, len(request.data), routes.replayed, runs, request.heads, handle.trains_second
        )
        with routes.forward(index, 0, rank_batch.layout), loads.forward(0, rank_batch.inputs.padding):
            output = handle.model(rank_batch.inputs)
        loss = results.add(index, batch, rank_batch.outputs(output, handle.groups))
    if not request.forward_only:
        assert loss is not None, "a backward pass has a loss"
        with device_span(device, "backward", "micro_batch", **work):
            loss.backward()
