"""Cutting a push into buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable

from rl_backend.contracts import ConfigError, TensorInfo


def split_into_buckets(tensors: Iterable[TensorInfo], byte_budget: int) -> list[tuple[TensorInfo, ...]]:
    """Consecutive tensors, as many as fit into ``byte_budget`` bytes at a time, in order.

    Raises:
        ConfigError: a tensor alone is larger than the budget.
    """
    buckets: list[tuple[TensorInfo, ...]] = []
    current: list[TensorInfo] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > byte_budget:
            raise ConfigError.of(
                "byte_budget", byte_budget, f"{tensor.name} alone has {tensor.nbytes} bytes; use at least that many"
            )
        if current and size + tensor.nbytes > byte_budget:
            buckets.append(tuple(current))
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    if current:
        buckets.append(tuple(current))
    return buckets
