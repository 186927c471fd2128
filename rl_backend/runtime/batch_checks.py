"""Checks of micro-batches that every rank must pass before any rank starts to communicate."""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import BatchError, PackedBatch, check_keys, check_routes
from rl_backend.contracts.replay import KEYS, ROUTES, ROUTES_MASK
from rl_backend.runtime.engine import GuardedHandle
from rl_backend.runtime.passes import PassRequest


def check_micro_batches(handle: GuardedHandle, request: PassRequest) -> None:
    """Refuses data that cannot run, on every rank together: no rank is left waiting in a collective.

    Raises:
        BatchError: :func:`problem_on_rank`; other data than on another rank of the replica; another number of micro-batches,
            or another kind of pass, on another rank; another rank refused its data; or a number that the engine cannot run.
    """
    data, groups = request.data, handle.groups
    world, replica = groups.world_group, groups.replica_group
    problem = problem_on_rank(handle, request)
    if replica.size() > 1:
        difference = problem_in_replica(checksum(data), replica, groups.device)
        problem = problem or difference
    if world.size() > 1:
        ranks_problem = problem_between_ranks(len(data), problem is not None, request.kind, world, groups.device)
        problem = problem or ranks_problem
    if problem is not None:
        raise problem
    # Afterwards: by then all ranks have the same number, and none raises alone.
    handle.require_schedulable(len(data), forward_only=request.forward_only)


def problem_on_rank(handle: GuardedHandle, request: PassRequest) -> BatchError | None:
    """What is wrong with this rank's micro-batches by themselves.

    No micro-batches; one over ``max_tokens_per_micro_batch``; a sequence over ``max_length``; a token outside the
    vocabulary; a temperature that is not positive; routes that :func:`~rl_backend.contracts.check_routes` refuses, or
    recorded keys that :func:`~rl_backend.contracts.check_keys` refuses; sequences that no LoRA tenant of the pass has.
    """
    data, vocab_size, max_length = request.data, handle.vocab_size, handle.max_length
    max_tokens = handle.config.max_tokens_per_micro_batch
    if not data:
        return BatchError("forward_backward without micro-batches; every rank needs at least one")
    for index, batch in enumerate(data):
        if batch.num_tokens > max_tokens:
            return BatchError(
                f"micro-batch {index} has {batch.num_tokens} tokens; max_tokens_per_micro_batch={max_tokens}; split it or "
                "raise the limit",
                micro_batch=index,
                num_tokens=batch.num_tokens,
            )
        longest = int(batch.seq_lens.max())
        if max_length is not None and longest > max_length:
            return BatchError(
                f"micro-batch {index} has a sequence of {longest} tokens; the model has {max_length} positions",
                micro_batch=index,
                longest=longest,
            )
        least, most = (int(value) for value in torch.aminmax(batch.input_ids))
        if least < 0 or most >= vocab_size:
            return BatchError(
                f"micro-batch {index} has token {least if least < 0 else most}; the vocabulary has {vocab_size} tokens, "
                f"0 to {vocab_size - 1}",
                micro_batch=index,
            )
        try:
            temperature = batch.temperature
        except BatchError as error:
            return _of_micro_batch(index, error)
        if isinstance(temperature, Tensor) and not bool((temperature > 0).all()):
            lowest = float(temperature.min())
            return BatchError(f"micro-batch {index}: temperature {lowest}; it must be above 0", micro_batch=index)
    for index, batch in enumerate(data):
        try:
            if KEYS in batch.token_fields:
                check_keys(batch, handle.indexed_layers)
            if request.router_replay == "replay" and handle.routed_layers is not None:
                check_routes(batch, handle.routed_layers)
        except BatchError as error:
            return _of_micro_batch(index, error)
    return None if request.adapters is None else request.adapters.problem(data)


def checksum(data: Sequence[PackedBatch]) -> int:
    """Of what the ranks of a replica must have in common."""
    found = 0
    for batch in data:
        recorded = [batch.token_fields[name] for name in (ROUTES, ROUTES_MASK, KEYS) if name in batch.token_fields]
        for tensor in (batch.seq_lens, batch.input_ids, *recorded):
            # Bytes, because numpy lacks types that these may have before they are refused.
            found = zlib.crc32(tensor.cpu().contiguous().view(torch.uint8).numpy(), found)
    return found


def _of_micro_batch(index: int, error: BatchError) -> BatchError:
    return BatchError(f"micro-batch {index}: {error}", **{**error.details, "micro_batch": index})


def problem_in_replica(checksum: int, group: dist.ProcessGroup, device: torch.device) -> BatchError | None:
    """Whether the ranks of ``group`` have different checksums. A collective."""
    extremes = torch.tensor([checksum, -checksum], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.tolist()
    return None if largest == -smallest else different_in_replica()


def different_in_replica() -> BatchError:
    return BatchError(
        "the ranks of one model replica (tensor, pipeline and context parallel) have different micro-batches; give each of "
        "them the same"
    )


def different_kinds() -> BatchError:
    return BatchError(
        "forward_only, router_replay or the LoRA tenants with a loss differ between ranks; every rank must run the same "
        "kind of pass, with at least one sequence of each tenant"
    )


def refused_by(rank: int) -> BatchError:
    return BatchError(f"rank {rank} refused its micro-batches; nothing ran on any rank", rank=rank)


def problem_between_ranks(
    count: int, refused: bool, kind: int, group: dist.ProcessGroup, device: torch.device
) -> BatchError | None:
    """Whether another rank of ``group`` refused its data, or has another number or kind of it. A collective."""
    # The largest negative is the smallest: one collective gives both ends of every fact.
    facts = [count, kind, group.rank() + 1 if refused else 0]
    extremes = torch.tensor([*facts, *(-fact for fact in facts)], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    most_count, largest_kind, last_refusing, least_count, smallest_kind, _ = extremes.tolist()
    if last_refusing:
        return refused_by(last_refusing - 1)
    if most_count != -least_count:
        return BatchError(
            f"this rank ({dist.get_rank()}) has {count} micro-batches, others have {-least_count} to "
            f"{most_count}; every rank needs the same number",
            micro_batches=count,
            least=-least_count,
            most=most_count,
        )
    if largest_kind != -smallest_kind:
        return different_kinds()
    return None
