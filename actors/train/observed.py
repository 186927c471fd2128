"""What a rank reports about its operations: an event of the trace, and Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from actors.cluster import prometheus
from actors.train.context import HandleRef, RankContext
from actors.train.order import OperationHeader
from rl_backend.contracts import HandleError, PackedBatch
from rl_backend.trace import span
from rl_backend.trace.recorder import Argument


@contextmanager
def observed(context: RankContext, header: OperationHeader, arguments: Sequence[Any]) -> Iterator[None]:
    """Reports the operation that its body runs; models and weight versions are those after it."""
    tags = {"group": context.group_id[:8], "rank": str(context.rank)}
    started = time.perf_counter()
    with span(header.name, "operation", operation=header.number) as event:
        yield
        event.add(**_work(arguments))
        for name, version in _weight_versions(context, arguments).items():
            event.add(model=name, weight_version=version)
            prometheus.set_gauge("rl_backend_rank_weight_version", version, model=name, **tags)
    prometheus.count("rl_backend_operations_total", 1, operation=header.name, **tags)
    seconds = time.perf_counter() - started
    prometheus.count("rl_backend_operation_seconds_total", seconds, operation=header.name, **tags)
    prometheus.count("rl_backend_trained_tokens_total", float(_work(arguments).get("tokens") or 0), **tags)


def _weight_versions(context: RankContext, arguments: Sequence[Any]) -> dict[str, int]:
    versions = {}
    for argument in arguments:
        if isinstance(argument, HandleRef):
            try:
                versions[argument.name] = context.handle(argument).weight_version
            except HandleError:  # a caller's function may take a reference that means nothing to this group
                continue
    return versions


def _work(arguments: Sequence[Any]) -> dict[str, Argument]:
    """Size of an operation's micro-batches; empty when it has none."""
    for argument in arguments:
        if isinstance(argument, list | tuple) and argument and isinstance(argument[0], PackedBatch):
            return {
                "micro_batches": len(argument),
                "tokens": sum(batch.input_ids.shape[0] for batch in argument),
                "sequences": sum(batch.seq_lens.shape[0] for batch in argument),
            }
    return {}
