"""A model handle that is its facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_backend.contracts import Head, ModelHandle


@dataclass(eq=False)
class PlainHandle:
    """What :class:`~rl_backend.contracts.ModelHandle` asks for."""

    name: str
    forward_only: bool
    weight_version: int
    data_parallel_rank: int
    data_parallel_size: int
    head: Head = "log_probs"
    micro_batch_multiple: int = 1
    base: ModelHandle | None = None
    lora_id: int = -1
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shares_prefixes: bool = False
