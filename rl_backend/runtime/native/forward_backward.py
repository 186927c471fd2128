"""Micro-batches laid out over the ranks and run forward and backward, by one rank or by the stages of a pipeline."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from rl_backend.contracts import (
    ForwardResult,
    Head,
    ModelOutput,
    PackedBatch,
    RoutedLayers,
    UnsupportedError,
    stored_tensors,
    text_config,
)
from rl_backend.contracts.replay import KEYS
from rl_backend.model import ModelInput
from rl_backend.model.input import Predictions, SecondTokens, each_prediction_once, second_labels
from rl_backend.parallel import fsdp
from rl_backend.parallel.collectives import all_gather
from rl_backend.parallel.context import TokenLayout, gather_outputs, lay_out_tokens, lay_out_tree
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.pipeline.catalog import make_schedule
from rl_backend.pipeline.executor import PipelineExecutor, add_gradients_of_copies, drop_gradients_of_copies
from rl_backend.pipeline.measured import SPAN_NAMES, span_arguments
from rl_backend.pipeline.schedule import Action, Schedule
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.prefix_tree import PrefixTree, take_rows
from rl_backend.primitive.router import RowSequences
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import has_last_stage, schedule_name
from rl_backend.runtime.native.routers import PassRouters
from rl_backend.runtime.passes import PassRequest, PassResults
from rl_backend.runtime.recording import gather_outputs_of_stages, record_outputs, routes_to_replay
from rl_backend.trace.device import device_span


@dataclass(frozen=True)
class RankBatch:
    """This rank's part of a micro-batch of T tokens."""

    inputs: ModelInput  # what the model takes: N tokens
    layout: TokenLayout | None  # which of the T these are; None where they are all, in their order
    of_tokens: Tensor | None = None  # (T,), which of the model's outputs is each token's, where sequences share some
    computed: int = 0  # tokens of the micro-batch, those that sequences share once

    def outputs(self, output: ModelOutput, groups: ParallelGroups) -> ModelOutput:
        """(N,) of this rank -> (T,) in the batch's order, the same on every rank of a replica."""
        gather: Callable[[Tensor], Tensor]
        if self.of_tokens is not None:
            gather = partial(take_rows, rows=self.of_tokens)
        elif self.layout is not None:
            gather = partial(gather_outputs, layout=self.layout, group=groups.cp_group)
        else:
            return output
        gathered = {name: gather(value) for name, value in output._asdict().items() if value is not None}
        return output._replace(**gathered)


def lay_out(
    batch: PackedBatch,
    groups: ParallelGroups,
    num_micro_batches: int,
    replayed: RoutedLayers | None = None,
    runs: Callable[[Sequence[int]], tuple[AdapterRun, ...]] | None = None,
    heads: Sequence[Head] = (),
    trains_second: bool = False,
    tree: PrefixTree | None = None,
    predicts: bool = True,
) -> RankBatch:
    """The part of ``batch``, which is on the training device, that this rank has under context and tensor parallelism.

    Args:
        replayed: the model's layers with experts, where these must take the routes of the batch.
        runs: rows of each sequence on this rank -> the adapters that work on them.
        trains_second: whether the model is trained on the tokens after the next.
        tree: what sequences share and is computed once; for ranks without context parallelism.
        predicts: whether this rank has the head.
    """
    seq_lens: Sequence[int] = tuple(batch.seq_lens.tolist())
    layout = _token_layout(seq_lens, groups, tree)
    if layout is None:
        rows, position_ids, segments = seq_lens, batch.position_ids, Segments.of_sequences(batch.cu_seqlens, seq_lens)
    else:
        rows, position_ids, segments = layout.sequence_rows, layout.position_ids, layout.segments

    def take(values: Tensor, padding: float) -> Tensor:
        return values if layout is None else layout.take(values, padding)

    def share(values: Tensor) -> Tensor:
        return values if layout is None else torch.tensor_split(values, groups.tp_group.size())[groups.tp_group.rank()]

    routes, keys = None if replayed is None else routes_to_replay(batch, replayed), batch.token_fields.get(KEYS)
    padding = None if layout is None or layout.padding is None else share(layout.padding)
    sequences, second = _row_sequences(batch, layout, groups, shared=tree is not None), None
    if trains_second and tree is None:
        following, total = batch.next_ids, sum(max(length - 2, 0) for length in seq_lens)
        labels = take(second_labels(following), -100)
        second = SecondTokens(take(following, -100), labels, total, position_ids, segments, padding, sequences)
    elif trains_second and layout is not None:
        # A shared token has another next one in each sequence.
        whole = lay_out(batch, groups, num_micro_batches, trains_second=True)
        places = layout.places if whole.layout is None else whole.layout.take(layout.places, 0)
        second = whole.inputs.second and whole.inputs.second._replace(of_rows=share(places))
    # To sort them takes time, and stages without the head read none.
    wanted = _predictions(batch, layout, shared=tree is not None and predicts)
    adapters = () if runs is None else runs(rows)
    inputs = ModelInput(
        input_ids=take(batch.input_ids, 0),
        position_ids=position_ids,
        segments=segments,
        labels=wanted.labels,
        temperature=wanted.temperature,
        padding=padding,
        routes=None if routes is None else share(take(routes, -1)),
        keys=None if keys is None else take(keys, -1),
        sequences=sequences,
        adapters=adapters,
        head_adapters=None if wanted.of_rows is None else _at_predictions(adapters, wanted.of_rows),
        of_rows=wanted.of_rows,
        second=second,
        longest=max(seq_lens),
        calculate_entropy=bool(batch.meta.get("calculate_entropy", False)),
        num_top=batch.num_top,
        cuts=wanted.cuts,
        router_loss_weight=1.0 / num_micro_batches,
        heads=heads,
    )
    return RankBatch(inputs, layout, wanted.of_tokens, batch.num_tokens if tree is None else tree.num_rows)


def _token_layout(seq_lens: Sequence[int], groups: ParallelGroups, tree: PrefixTree | None) -> TokenLayout | None:
    multiple, device = groups.tp_group.size(), groups.device
    if tree is not None:
        return lay_out_tree(tree, multiple=multiple, device=device)
    if groups.token_group.size() == 1:
        return None
    cp = groups.cp_group
    return lay_out_tokens(seq_lens, cp_size=cp.size(), cp_rank=cp.rank(), multiple=multiple, device=device)


def _predictions(batch: PackedBatch, layout: TokenLayout | None, *, shared: bool) -> Predictions:
    labels, temperature, cuts = batch.labels, batch.temperature, batch.cuts
    if layout is None:
        return Predictions(labels, temperature, cuts)
    if shared:
        return each_prediction_once(layout.places, labels, temperature, cuts)
    divisors = layout.take(temperature, 1.0) if isinstance(temperature, Tensor) else temperature
    if cuts is not None and cuts.mask is not None:
        cuts = cuts._replace(mask=layout.take(cuts.mask, -1))
    return Predictions(layout.take(labels, -100), divisors, cuts)


def _row_sequences(batch: PackedBatch, layout: TokenLayout | None, groups: ParallelGroups, *, shared: bool) -> RowSequences:
    sequences, number, tp = batch.sequence_ids, batch.num_sequences, groups.tp_group
    if layout is None:
        return RowSequences(sequences, number)
    if not shared:
        return RowSequences(torch.tensor_split(layout.take(sequences, 0), tp.size())[tp.rank()], number)
    size = len(layout.index) // tp.size()
    rows = layout.places - size * tp.rank()
    mine = (rows >= 0) & (rows < size)
    return RowSequences(sequences[mine], number, rows[mine])


def _at_predictions(runs: Sequence[AdapterRun], of_rows: Tensor) -> tuple[AdapterRun, ...]:
    edges = torch.tensor([edge for run in runs for edge in (run.start, run.stop)], dtype=torch.int64)
    edges = edges.to(of_rows.device, non_blocking=True)
    # Ascending, so that those of a run are neighbours too.
    places = torch.searchsorted(of_rows, edges).tolist()
    return tuple(
        replace(run, start=start, stop=stop) for run, start, stop in zip(runs, places[::2], places[1::2], strict=True)
    )


def _rank_batch(
    handle: NativeHandle, request: PassRequest, index: int, batch: PackedBatch, replayed: RoutedLayers | None
) -> RankBatch:
    runs = partial(request.runs, index, batch)
    tree = request.prefix_tree(handle, index)
    predicts = has_last_stage(handle.options, handle.groups.pp_group.rank())
    return lay_out(
        batch, handle.groups, len(request.data), replayed, runs, request.heads, handle.trains_second, tree, predicts
    )


def _computed(handle: NativeHandle, rank_batch: RankBatch) -> int | None:
    return rank_batch.computed if handle.options.share_prefixes == "auto" else None


def run_micro_batches(handle: NativeHandle, request: PassRequest) -> ForwardResult:
    """Runs checked micro-batches; see :func:`~rl_backend.runtime.passes.check_returned` for what a loss may return."""
    data, forward_only = request.data, request.forward_only
    routers = PassRouters(handle, request.router_replay, forward_only=forward_only)
    results = PassResults(request, handle.groups.dp_group, handle.has_outputs)
    with abandoned_on_error(handle, forward_only):
        for index in range(len(data)):
            if not forward_only:
                # What is not reduced before is in the last backward pass, with what was left of it.
                last = index == len(data) - 1
                fsdp.set_backward(
                    handle.model,
                    reduce=last or handle.options.reduce_gradients == "per_micro_batch",
                    reshard=last or handle.options.reshard_after_forward,
                )
            _run_one(handle, request, index, routers, results)
    routers.loads.commit()
    return results.result(routers.outputs(data))


@contextmanager
def abandoned_on_error(handle: NativeHandle, forward_only: bool) -> Generator[None]:
    """Around the passes of one ``forward_backward``: leaves FSDP ready for the next, even after an error in the middle."""
    try:
        yield
    except BaseException:
        fsdp.abandon_step(handle.model)
        if not forward_only:
            handle.mark_incomplete()
        raise
    fsdp.reshard(handle.model)


def _run_one(handle: NativeHandle, request: PassRequest, index: int, routers: PassRouters, results: PassResults) -> None:
    # A function of its own, so that nothing of a micro-batch outlives it.
    device = handle.groups.device
    batch = request.data[index].to(device)
    work = {"micro_batch": index, "tokens": batch.num_tokens, "sequences": batch.num_sequences}
    with torch.set_grad_enabled(not request.forward_only), device_span(device, "forward", "micro_batch", **work):
        rank_batch = _rank_batch(handle, request, index, batch, routers.replayed)
        with routers.forward(index, 0, rank_batch.layout, rank_batch.inputs):
            output = handle.model(rank_batch.inputs)
        loss = results.add(index, batch, rank_batch.outputs(output, handle.groups), _computed(handle, rank_batch))
    if not request.forward_only:
        assert loss is not None, "a backward pass has a loss"
        with device_span(device, "backward", "micro_batch", **work):
            loss.backward()


def run_pipeline(handle: NativeHandle, request: PassRequest) -> ForwardResult:
    """As :func:`run_micro_batches`, with this rank's stages and the configuration's schedule.

    Losses and metrics are on the ranks of the last stage, outputs on its source rank.
    """
    handle.num_passes += 1
    trains, options = not request.forward_only, handle.options
    schedule = _schedule(handle, len(request.data), forward_only=request.forward_only)
    work = _Stages(handle, request, schedule)
    for stage in handle.stages.values():
        # What is not reduced in every backward pass is when the whole schedule has run.
        reduces = options.reduce_gradients == "per_micro_batch"
        fsdp.set_backward(stage, reduce=reduces, reshard=options.reshard_after_forward)
    with abandoned_on_error(handle, request.forward_only):
        if trains:
            # What is left in them was added to the originals by the pass before.
            drop_gradients_of_copies(handle.parameters, handle.stage_copies)
        with torch.set_grad_enabled(trains):
            PipelineExecutor(schedule, handle.groups.pp_group, work).run()
        if trains:
            for stage in handle.stages.values():
                fsdp.reduce_gradients(stage)
            work.routers.loads.commit()
            add_gradients_of_copies(handle.parameters, handle.stage_copies, handle.groups.pp_group)
    return work.results.result(work.routers.outputs(request.data))


_make_schedule = lru_cache(maxsize=32)(make_schedule)


def _schedule(handle: NativeHandle, num_micro_batches: int, *, forward_only: bool) -> Schedule:
    name, parallel = schedule_name(handle.options), handle.options.parallel
    assert name is not None, "a handle with stages has a schedule"
    return _make_schedule(name, parallel.pp, num_micro_batches, stages_per_rank=parallel.vpp, forward_only=forward_only)


class _Stages:
    def __init__(self, handle: NativeHandle, request: PassRequest, schedule: Schedule) -> None:
        self._handle = handle
        self._schedule = schedule
        self._data = [batch.to(handle.groups.device) for batch in request.data]
        self.routers = PassRouters(handle, request.router_replay, forward_only=request.forward_only)
        self._rank_batches = [
            _rank_batch(handle, request, index, batch, self.routers.replayed) for index, batch in enumerate(self._data)
        ]
        self.results = PassResults(request, handle.groups.dp_group, handle.has_outputs)

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor | None:
        rank_batch = self._rank_batches[micro_batch]
        with self.routers.forward(micro_batch, stage, rank_batch.layout, rank_batch.inputs):
            # All stages but the last return hidden states.
            output: Tensor | ModelOutput = self._handle.stages[stage](rank_batch.inputs._replace(hidden=hidden))
        if isinstance(output, Tensor):
            return output
        output = rank_batch.outputs(output, self._handle.groups)
        computed = _computed(self._handle, rank_batch)
        return self.results.add(micro_batch, self._data[micro_batch], output, computed)

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
            if handle.options.compile:
                # Hooks see nothing of compiled code.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            recorded = {
                stage: stack.enter_context(record_outputs(module, hf_names, hidden_size))
                for stage, module in (handle.stages or {0: handle.model}).items()
            }
            run(handle, request._replace(data=[batch]))
        tree = request.prefix_tree(handle, index)
        layout = lay_out(batch.to(handle.groups.device), handle.groups, 1, tree=tree).layout
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
