"""Which layouts a dense decoder can have."""

from __future__ import annotations

from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.model.dense.architecture import DenseArchitecture


def check_layout(arch: DenseArchitecture, parallel: ParallelConfig) -> None:
    """Raises :class:`~rl_backend.contracts.ConfigError` for sizes that do not divide the model."""
    check_decoder(arch, parallel)
    require_divided("tp", parallel.tp, "intermediate_size", arch.intermediate_size)
    for name in ("ep", "etp"):
        size = getattr(parallel, name)
        if size > 1:
            raise ConfigError.of(f"ParallelConfig.{name}", size, "this model has no experts; use 1")


def check_decoder(arch: DenseArchitecture, parallel: ParallelConfig) -> None:
    """As :func:`check_layout`, of everything but the feed-forward blocks."""
    require_divided("tp", parallel.tp, "num_attention_heads", arch.num_heads)
    kv_heads, tp = arch.num_kv_heads, parallel.tp
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError.of(
            "ParallelConfig.tp",
            tp,
            f"num_key_value_heads={kv_heads} is no multiple of it ({kv_heads} / {tp} = {kv_heads / tp:.2f} heads a rank) "
            f"and does not divide it either, so that heads could be copied; {_near(tp, _tp_sizes(arch))}",
        )


def require_divided(dimension: str, ranks: int, name: str, size: int) -> None:
    """Raises :class:`~rl_backend.contracts.ConfigError` unless ``ranks`` divides ``size``."""
    if size % ranks:
        raise ConfigError.of(
            f"ParallelConfig.{dimension}",
            ranks,
            f"does not divide {name}={size} ({size} / {ranks} = {size / ranks:.2f}); {_near(ranks, _divisors(size))}",
        )


def _tp_sizes(arch: DenseArchitecture) -> list[int]:
    kv_heads = arch.num_kv_heads
    return [size for size in _divisors(arch.num_heads) if kv_heads % size == 0 or size % kv_heads == 0]


def _divisors(size: int) -> list[int]:
    return [candidate for candidate in range(1, size + 1) if size % candidate == 0]


def _near(ranks: int, working: list[int]) -> str:
    below = [size for size in working if size < ranks][-1:]
    above = [size for size in working if size > ranks][:1]
    return f"use {' or '.join(map(str, below + above))}"
