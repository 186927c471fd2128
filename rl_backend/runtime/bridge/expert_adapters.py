"""Adapters in one chunk of a Megatron model, and on its experts."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs
from torch import Tensor

from rl_backend.parallel.collectives import all_gather_into
from rl_backend.primitive.adapted_experts import RowOwners, TokenShare, row_owners
from rl_backend.primitive.adapted_layers import ENOUGH_ROWS
from rl_backend.primitive.adapter_runs import AdapterRun, adapters_at_work
from rl_backend.runtime.bridge.batch import LaidOut


class ChunkAdapters:
    """The adapters of one chunk of a model.

    Attributes:
        laid_out: the micro-batch that the chunk works on; None where no adapter does.
    """

    def __init__(self) -> None:
        self.laid_out: LaidOut | None = None

    @contextmanager
    def forward(self, laid_out: LaidOut) -> Generator[None]:
        """Around the forward pass of the chunk."""
        self.laid_out = laid_out if laid_out.adapters else None
        try:
            yield
        finally:
            self.laid_out = None

    def before_backward(self, laid_out: LaidOut, output: Tensor) -> None:
        """Has the backward pass from ``output`` find its adapters: layers may be computed again, and other micro-batches
        come through the chunk before that.
        """
        if laid_out.adapters and output.requires_grad:
            output.register_hook(lambda _: setattr(self, "laid_out", laid_out))


def attach_to_experts(layer: Any, chunk: ChunkAdapters, tp: dist.ProcessGroup) -> None:
    """Lets each expert of a ``MoELayer`` know whose its rows are. Replaces ``forward`` of its experts and ``gating``."""
    expert_ranks = layer.token_dispatcher.tp_size * layer.token_dispatcher.ep_size
    share = TokenShare(0, tp.rank() // expert_ranks, -(-tp.size() // expert_ranks))
    layer.experts.forward = partial(_forward, layer.experts, layer.token_dispatcher, chunk, tp, share)
    layer.router.gating = partial(_gate, layer.router, chunk)


def _gate(router: Any, chunk: ChunkAdapters, hidden: Tensor) -> Tensor:
    """As Megatron's own, (columns, rows, H) -> (columns, rows, experts), but of enough rows for scores that do not depend on
    how many there are.
    """
    columns, rows, _ = hidden.shape
    missing = ENOUGH_ROWS - columns * rows
    if chunk.laid_out is None or missing <= 0:
        return type(router).gating(router, hidden)  # type: ignore[no-any-return]
    padded = F.pad(hidden.flatten(0, 1), (0, 0, 0, missing))[:, None]
    scores: Tensor = type(router).gating(router, padded)
    return scores[: columns * rows].view(columns, rows, -1)


def _forward(
    experts: Any,
    dispatcher: Any,
    chunk: ChunkAdapters,
    tp: dist.ProcessGroup,
    share: TokenShare,
    rows: Tensor,
    counts: Tensor,
    probs: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As Megatron's ``SequentialMLP``: (N, hidden_size) and their weights, those of this rank's first expert first."""
    laid_out = chunk.laid_out
    if laid_out is None:
        return type(experts).forward(experts, rows, counts, probs, **options)  # type: ignore[no-any-return]
    with adapters_at_work(laid_out.adapters):
        owners = row_owners(laid_out.batch.num_tokens, share, rows.device)
    sizes = counts.tolist()
    runs: Sequence[Sequence[AdapterRun]] = [()] * len(sizes)
    order: Tensor | None = None
    if owners is not None:
        order, runs = _sorted(owners, laid_out, dispatcher, tp, counts)
        rows, probs = rows.index_select(0, order), probs.index_select(0, order)
    found = []
    for expert, own, weights, work in zip(experts.local_experts, rows.split(sizes), probs.split(sizes), runs, strict=True):
        with adapters_at_work(work):
            found.append(expert(own, weights)[0])
    output = torch.cat(found)
    return output if order is None else output.index_select(0, order.argsort()), None


@torch.no_grad()
def _sorted(
    owners: RowOwners, laid_out: LaidOut, dispatcher: Any, tp: dist.ProcessGroup, counts: Tensor
) -> tuple[Tensor, list[list[AdapterRun]]]:
    """(N,) the order of rows by expert, owner and sender, and the runs of each expert, from its first row on."""
    senders = dispatcher.tp_size * dispatcher.ep_size
    rows, columns = laid_out.shape
    all_owners = owners.of_rows.new_full((rows * columns,), len(owners.keys))
    all_owners[laid_out.places] = owners.of_rows
    mine = all_owners.chunk(tp.size())[tp.rank()]
    drawn = torch.tensor(owners.draws, device=mine.device)
    draws = drawn.new_empty(senders * len(drawn))
    all_gather_into(draws, drawn, group=dispatcher.tp_ep_group)
    arrived = _dispatched(dispatcher, mine * senders + dispatcher.tp_ep_group.rank())
    expert = torch.arange(len(counts), device=arrived.device).repeat_interleave(counts.to(arrived.device))
    order = torch.argsort(expert * (owners.kinds * senders) + arrived, stable=True)
    owner, sender = arrived // senders, arrived % senders
    places = (sender * len(counts) + expert) * owners.kinds + owner
    sent = places.bincount(minlength=senders * len(counts) * owners.kinds).view(senders, -1).tolist()
    first = [0, *counts.cumsum(0).tolist()]
    runs: list[list[AdapterRun]] = [[] for _ in range(len(counts))]
    for number, run in owners.runs(sent, draws.view(senders, -1).tolist()):
        runs[number].append(replace(run, start=run.start - first[number], stop=run.stop - first[number]))
    return order, runs


def _dispatched(dispatcher: Any, numbers: Tensor) -> Tensor:
    """(rows of this rank,) numbers, brought to where the dispatcher has just brought the rows: (N,)."""
    found = permute(numbers[:, None], dispatcher.routing_map, num_out_tokens=dispatcher.num_out_tokens)[0]
    found = all_to_all(dispatcher.ep_group, found, dispatcher.output_splits, dispatcher.input_splits)
    if dispatcher.tp_size > 1:
        splits = None if dispatcher.output_splits_tp is None else dispatcher.output_splits_tp.tolist()
        found = gather_from_sequence_parallel_region(found, group=dispatcher.tp_group, output_split_sizes=splits)
    if dispatcher.num_local_experts > 1:
        sizes = dispatcher.num_global_tokens_per_local_expert.ravel()
        found, _ = sort_chunks_by_idxs(found, sizes, dispatcher.sort_input_by_local_experts)
    arrived: Tensor = found.flatten()
    return arrived
