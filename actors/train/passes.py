"""Passes of a training group: sequences spread over its ranks, run there, and the results merged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from ray import cloudpickle
from torch import Tensor

from actors.train.context import HandleRef, RankContext, RankFunction
from rl_backend.contracts import (
    TARGET_IDS,
    BatchError,
    ForwardResult,
    LossFn,
    PackedBatch,
    TokenSequence,
    merge_metrics,
)
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data import (
    MicroBatchPlan,
    check_same_fields,
    compared_tokens,
    pack_plan,
    plan_micro_batches,
    plan_shared,
    plan_tenants,
    restore_order,
)
from rl_backend.lab.text import count
from rl_backend.runtime import RouterReplay


class Shares(NamedTuple):
    """Sequences, divided over the data-parallel ranks; ``seq_lens`` are with fillers, ``tenants`` says whose each is."""

    batches: Sequence[Sequence[PackedBatch]]
    plan: MicroBatchPlan
    seq_lens: Sequence[int]
    tenants: Sequence[int] = ()


class PassOptions(NamedTuple):
    """What a pass is asked beside its sequences; ``meta`` as the caller gave it."""

    max_tokens: int
    has_loss: bool
    forward_only: bool
    router_replay: RouterReplay
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Pass:
    """A pass as it is sent, spread over the layout of its model.

    Attributes:
        handle: with the layout.
        divided: how the sequences are, without the batches themselves.
        shares: pickled, one for each data-parallel rank: those that share one get the same bytes.
    """

    handle: HandleRef
    options: PassOptions
    divided: Shares
    shares: Sequence[bytes]

    @classmethod
    def over(cls, handle: HandleRef, rows: Sequence[TokenSequence], options: PassOptions) -> Self:
        """Raises :class:`~rl_backend.contracts.BatchError` for data that does not fit its contract."""
        given: dict[str, Any] = {"forward_only": options.forward_only, "router_replay": options.router_replay}
        divided = spread(handle, rows, options)
        shares = [cloudpickle.dumps(RankFunction(forward_backward, (handle, data), given)) for data in divided.batches]
        return cls(handle, options, divided._replace(batches=()), shares)

    @property
    def calls(self) -> Sequence[bytes]:
        return [self.shares[dp_rank] for dp_rank in self.handle.data_parallel_ranks]

    def on(self, handle: HandleRef) -> Self:
        """The same pass, spread over another layout of the model."""
        batches = (cloudpickle.loads(share).args[1] for share in self.shares)
        rows = [[row for batch in of_rank for row in _unpacked(batch)] for of_rank in batches]
        return self.over(handle, restore_order(self.divided.plan, rows), self.options)

    def describe(self) -> str:
        """Its rows."""
        lengths, ranks = self.divided.seq_lens, count(self.handle.data_parallel_size, "data-parallel rank")
        return f"{count(len(lengths), 'sequence')} of up to {max(lengths)} tokens, {sum(lengths)} in all, on {ranks}"

    def without_shares(self) -> Self:
        """What merges the results, without the sequences."""
        return replace(self, shares=())

    def merged(self, values: Sequence[ForwardResult]) -> ForwardResult:
        return merged(self.handle, self.divided, values)


def _unpacked(batch: PackedBatch) -> Iterator[TokenSequence]:
    fields = {name: batch.split(value) for name, value in batch.token_fields.items()}
    for index, ids in enumerate(batch.split(batch.input_ids)):
        own = {name: value[index] for name, value in batch.sequence_fields.items()}
        yield TokenSequence(ids, {name: rows[index] for name, rows in fields.items()}, own)


def spread(handle: HandleRef, rows: Sequence[TokenSequence], options: PassOptions) -> Shares:
    has_tenants, has_loss = bool(rows) and LORA_FIELD in rows[0].sequence_fields, options.has_loss
    # Here, not on the ranks: fillers are chosen by whether there is a loss.
    if not (has_loss or options.forward_only):
        raise BatchError("loss=None: only a forward_only pass can do without a loss")
    check_same_fields(rows)
    seq_lens = [len(sequence) for sequence in rows]
    dp_size, max_tokens, multiple_of = handle.data_parallel_size, options.max_tokens, handle.micro_batch_multiple
    # A loss that reads neither a mask nor targets would count fillers.
    fill = not has_loss or not rows[0].token_fields.keys().isdisjoint(("loss_mask", TARGET_IDS))
    tenants: list[int] = []
    if has_tenants and handle.lora_id < 0:
        tenants = [int(row.sequence_fields[LORA_FIELD]) for row in rows]
        plan = plan_tenants(seq_lens, tenants, dp_size, max_tokens, multiple_of=multiple_of, fill=fill)
    else:
        plan = _shared_plan(handle, rows, options) or plan_micro_batches(
            seq_lens, dp_size, max_tokens, multiple_of=multiple_of, fill=fill
        )
    return Shares(pack_plan(rows, plan, options.meta), plan, plan.with_fillers(seq_lens), tenants)


def _shared_plan(handle: HandleRef, rows: Sequence[TokenSequence], options: PassOptions) -> MicroBatchPlan | None:
    if not handle.shares_prefixes:
        return None
    replays = options.router_replay == "replay"
    tokens = [compared_tokens(row.input_ids, row.token_fields, replays=replays) for row in rows]
    return plan_shared(tokens, handle.data_parallel_size, options.max_tokens, multiple_of=handle.micro_batch_multiple)


def token_budget(wanted: int | None, most: int) -> int:
    if wanted is not None and wanted > most:
        raise BatchError(
            f"max_tokens_per_micro_batch={wanted} is more than the configuration's {most}; ask for less, or build the "
            "group with a larger RuntimeConfig.max_tokens_per_micro_batch"
        )
    return most if wanted is None else wanted


def forward_backward(
    context: RankContext, handle: HandleRef, data: Sequence[PackedBatch], loss_fn: LossFn | None = None, **arguments: Any
) -> ForwardResult:
    """A pass on one rank, in training or evaluation mode. Of each output it answers one tensor, the sequences end to end, in
    which tenants have theirs too.
    """
    runtime, model = context.runtime, context.handle(handle)
    # The frozen base of tenants is in evaluation mode while they train.
    evaluates = arguments.get("forward_only") or model.forward_only
    with runtime.eval_mode(model) if evaluates else runtime.train_mode(model):
        result = runtime.forward_backward(model, data, loss_fn, **arguments)
    # A view of a tensor is pickled with all of the tensor, so sequences travel as one.
    outputs = {name: (torch.cat(list(rows)).cpu(),) for name, rows in result.outputs.items()}
    tenants = {
        name: replace(part, metrics=dict(part.metrics), outputs=dict.fromkeys(part.outputs, ()))
        for name, part in result.tenants.items()
    }
    return replace(result, metrics=dict(result.metrics), outputs=outputs, tenants=tenants)


def merged(handle: HandleRef, shares: Shares, values: Sequence[ForwardResult]) -> ForwardResult:
    sources = [values[rank] for rank in handle.source_ranks]
    outputs = {}
    for name in sources[0].outputs:
        per_rank = [
            source.outputs[name][0].split([shares.seq_lens[index] for index in shares.plan.rank_indices(dp_rank)])
            for dp_rank, source in enumerate(sources)
        ]
        outputs[name] = restore_order(shares.plan, per_rank)
    tenants = {
        name: _tenant_result(part.lora_id, [source.tenants[name] for source in sources], shares.tenants, outputs)
        for name, part in sources[0].tenants.items()
    }
    return replace(_of_all(sources), outputs=outputs, tenants=tenants)


def _tenant_result(
    lora_id: int, parts: Sequence[ForwardResult], tenants: Sequence[int], outputs: Mapping[str, Sequence[Tensor]]
) -> ForwardResult:
    own = {
        name: [value for value, each in zip(outputs[name], tenants, strict=True) if each == lora_id]
        for name in parts[0].outputs
    }
    error = next((part.error for part in parts if part.error), "")
    return replace(_of_all(parts), outputs=own, error=error, lora_id=lora_id)


def _of_all(parts: Sequence[ForwardResult]) -> ForwardResult:
    # Loss i is the mean over data-parallel ranks of each rank's i-th micro-batch, because gradients are averaged over them:
    # the sum of all is the number whose gradient the optimizer gets.
    losses = (sum(of_batch) / len(parts) for of_batch in zip(*(part.losses for part in parts), strict=True))
    return ForwardResult(tuple(losses), merge_metrics([part.metrics for part in parts]))
