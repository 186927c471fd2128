"""Operations over ranks: arguments split, results joined to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from ray import cloudpickle
from torch import Tensor

from actors.train.context import HandleRef
from actors.train.outcome import BuiltModel, RankForward, TenantForward
from rl_backend.contracts import BatchError, ForwardResult, HandleError, RLBackendError, merge_metrics
from rl_backend.contracts.atoms import ATOMS, Join, Operation
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data import (
    MicroBatchPlan,
    check_same_fields,
    pack_plan,
    plan_micro_batches,
    plan_tenants,
    restore_order,
    sequences_from_tensordict,
)


class Shares(NamedTuple):
    """An operation, divided over the ranks.

    Attributes:
        calls: the pickled :class:`~rl_backend.contracts.atoms.Operation` of each rank.
        plan, seq_lens: which sequences went where, and their lengths with those of fillers, for an operation that splits
            sequences.
        tenants: whose they are, by ``lora_id``; empty without LoRA tenants.
    """

    calls: Sequence[bytes]
    plan: MicroBatchPlan | None = None
    seq_lens: Sequence[int] = ()
    tenants: Sequence[int] = ()


def split(operation: Operation, num_ranks: int, max_tokens: int, *, has_loss: bool) -> Shares:
    """The share of every rank, as ``split`` of its atom says.

    Args:
        max_tokens: largest ``max_tokens_per_micro_batch``.
        has_loss: whether a loss is sent beside it.

    Raises:
        BatchError, HandleError: see :meth:`~actors.train.group.TrainGroup.forward_backward`; before any rank has seen it.
    """
    atom = ATOMS[operation.name]
    if atom.split == "same":
        return Shares([cloudpickle.dumps(operation)] * num_ranks)
    arguments = dict(operation.arguments)
    handle: HandleRef = arguments["handle"]
    trains = atom.needs_with(arguments.get(atom.flag)).trained
    given = arguments.pop("sequences")
    rows = given if isinstance(given, Sequence) else sequences_from_tensordict(given)
    has_tenants = bool(rows) and LORA_FIELD in rows[0].sequence_fields
    if handle.forward_only and trains and not has_tenants:
        raise HandleError(f"model {handle.name!r} is forward-only; a backward pass needs gradients", name=handle.name)
    if trains and not has_loss:
        raise BatchError("loss=None: only a forward_only pass can do without a loss")
    budget = _budget(arguments.pop("max_tokens_per_micro_batch"), max_tokens)
    meta = arguments.pop("meta")
    check_same_fields(rows)
    seq_lens = [len(sequence) for sequence in rows]
    dp_size, multiple_of = handle.data_parallel_size, handle.micro_batch_multiple
    # A loss that reads no mask would count fillers.
    fill = not has_loss or "loss_mask" in rows[0].token_fields
    tenants: list[int] = []
    if has_tenants and handle.lora_id < 0:
        tenants = [int(row.sequence_fields[LORA_FIELD]) for row in rows]
        plan = plan_tenants(seq_lens, tenants, dp_size, budget, multiple_of=multiple_of, fill=fill)
    else:
        plan = plan_micro_batches(seq_lens, dp_size, budget, multiple_of=multiple_of, fill=fill)
    of_data_parallel_rank = [
        cloudpickle.dumps(Operation(operation.name, {**arguments, "data": batches}))
        for batches in pack_plan(rows, plan, meta)
    ]
    calls = [of_data_parallel_rank[dp_rank] for dp_rank in handle.data_parallel_ranks]
    return Shares(calls, plan, plan.with_fillers(seq_lens), tenants)


def join(operation: Operation, shares: Shares, values: Sequence[Any], group_id: str) -> Any:
    """The result of the group from those of its ranks, as ``join`` of its atom says."""
    how = ATOMS[operation.name].join
    assert how is not None, "only atoms with a join are offered by a group"
    return _JOINS[how](operation, shares, values, group_id)


def _budget(wanted: int | None, most: int) -> int:
    if wanted is not None and wanted > most:
        raise BatchError(
            f"max_tokens_per_micro_batch={wanted} is more than the configuration's {most}; ask for less, or build the "
            "group with a larger RuntimeConfig.max_tokens_per_micro_batch"
        )
    return most if wanted is None else wanted


def _model(operation: Operation, shares: Shares, values: Sequence[BuiltModel], group_id: str) -> HandleRef:
    first, size = values[0], values[0].data_parallel_size
    sources = {built.data_parallel_rank: rank for rank, built in enumerate(values) if built.is_source}
    if sorted(sources) != list(range(size)) or sum(built.is_source for built in values) != size:
        raise RLBackendError(
            f"the runtime names ranks {sorted(sources.values())} as sources of the outputs of data-parallel ranks "
            f"{sorted(sources)}; expected one for each of {size}"
        )
    return HandleRef(
        group_id=group_id,
        key=first.key,
        name=first.name,
        forward_only=first.forward_only,
        data_parallel_ranks=tuple(built.data_parallel_rank for built in values),
        source_ranks=tuple(sources[dp_rank] for dp_rank in range(size)),
        head=first.head,
        lora_id=first.lora_id,
        micro_batch_multiple=first.micro_batch_multiple,
    )


def _forward_result(operation: Operation, shares: Shares, values: Sequence[RankForward], group_id: str) -> ForwardResult:
    """One ForwardResult from those of the source ranks.

    Loss i is the mean over data-parallel ranks of each rank's i-th micro-batch, because gradients are averaged over them:
    the sum of all is the number whose gradient the optimizer gets. Metrics add up over ranks; outputs are in the caller's
    order.
    """
    plan = shares.plan
    assert plan is not None, "sequences were split"
    sources = [values[rank] for rank in operation.arguments["handle"].source_ranks]
    losses = [sum(of_batch) / len(sources) for of_batch in zip(*(source.losses for source in sources), strict=True)]
    outputs = {}
    for name in sources[0].outputs:
        per_rank = [
            torch.split(source.outputs[name], [shares.seq_lens[index] for index in plan.rank_indices(dp_rank)])
            for dp_rank, source in enumerate(sources)
        ]
        outputs[name] = restore_order(plan, per_rank)
    metrics = merge_metrics([source.metrics for source in sources])
    tenants = {
        name: _tenant_result(part.lora_id, [source.tenants[name] for source in sources], shares.tenants, outputs)
        for name, part in sources[0].tenants.items()
    }
    return ForwardResult(tuple(losses), metrics, outputs, tenants)


def _tenant_result(
    lora_id: int, parts: Sequence[TenantForward], tenants: Sequence[int], outputs: Mapping[str, Sequence[Tensor]]
) -> ForwardResult:
    """As :func:`_forward_result`, of one tenant; ``tenants`` says whose each sequence is."""
    losses = [sum(of_batch) / len(parts) for of_batch in zip(*(part.losses for part in parts), strict=True)]
    return ForwardResult(
        tuple(losses),
        merge_metrics([part.metrics for part in parts]),
        {
            name: [value for value, each in zip(outputs[name], tenants, strict=True) if each == lora_id]
            for name in parts[0].outputs
        },
        error=next((part.error for part in parts if part.error), ""),
        lora_id=lora_id,
    )


def _equal(operation: Operation, shares: Shares, values: Sequence[Any], group_id: str) -> Any:
    if any(value != values[0] for value in values):
        name = operation.arguments["handle"].name
        raise RLBackendError(f"ranks disagree on the {operation.name.replace('_', ' ')} of {name!r}: {list(values)}")
    return values[0]


_JOINS: Mapping[Join, Callable[[Operation, Shares, Sequence[Any], str], Any]] = {
    "first": lambda operation, shares, values, group_id: values[0],
    "any": lambda operation, shares, values, group_id: any(values),
    "all": lambda operation, shares, values, group_id: list(values),
    "equal": _equal,
    "model": _model,
    "forward_result": _forward_result,
}
