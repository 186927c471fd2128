"""What a rank reports about its operations: an event of the trace, and Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from actors.cluster import prometheus
from actors.train.context import HandleRef, RankContext
from actors.train.order import OperationHeader
from rl_backend.contracts import HandleError
from rl_backend.contracts.operations import Operation
from rl_backend.trace import span
from rl_backend.trace.recorder import Argument


@contextmanager
def observed(context: RankContext, header: OperationHeader, operation: Operation) -> Iterator[None]:
    """Reports the operation that its body runs; models and weight versions are those after it."""
    tags = {"group": context.group_id[:8], "rank": str(context.rank)}
    work = _work(operation)
    started = time.perf_counter()
    with span(header.name, "operation", operation=header.number) as event:
        yield
        event.add(**work)
        for name, version in _weight_versions(context, operation).items():
            event.add(model=name, weight_version=version)
            prometheus.set_gauge("rl_backend_rank_weight_version", version, model=name, **tags)
    prometheus.count("rl_backend_operations_total", 1, operation=header.name, **tags)
    seconds = time.perf_counter() - started
    prometheus.count("rl_backend_operation_seconds_total", seconds, operation=header.name, **tags)
    prometheus.count("rl_backend_trained_tokens_total", float(work.get("tokens") or 0), **tags)


def _weight_versions(context: RankContext, operation: Operation) -> dict[str, int]:
    """Of the models that the operation was given; not of one whose last step others still have a part of."""
    versions = {}
    for argument in (operation.arguments.get("handle"), *operation.arguments.get("args", ())):
        if isinstance(argument, HandleRef):
            try:
                handle = context.handle(argument)
            except HandleError:  # a caller's function may take a reference that means nothing to this group
                continue
            if handle.is_settled:
                versions[argument.name] = handle.weight_version
    return versions


def _work(operation: Operation) -> dict[str, Argument]:
    """Size of an operation's micro-batches; empty when it has none."""
    if operation.atom.split != "sequences":
        return {}
    data = operation.arguments["data"]
    return {
        "micro_batches": len(data),
        "tokens": sum(batch.input_ids.shape[0] for batch in data),
        "sequences": sum(batch.seq_lens.shape[0] for batch in data),
    }
