"""This rank's shares of the weights, as verl's ``delta_sharded`` checkpoint engine takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.workers.engine.spec import BlockPlacement, ShardSpec, translate_flat_indices

from rl_backend.contracts import WeightShard

type DeltaEntry = tuple[list[tuple[str, tuple[int, ...]]], str, Tensor, Tensor, Tensor]
"""(names and shapes, dtype, (1,) number of changes, their places in the whole weight, their values)."""


def shards_with_specs(shards: Iterator[WeightShard]) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """verl's ``(name, local shard, ShardSpec)``: each share is a block of a weight that already has its final name."""
    for name, shape, offset, tensor in shards:
        spec = ShardSpec(
            full_shape=shape,
            place=BlockPlacement(tuple(tensor.shape), offset, shape),
            gather_group=dist.group.WORLD,
            contributes=tensor.numel() > 0,
        )
        yield name, tensor, spec


def delta_entry(name: str, spec: ShardSpec, place: Any, places_in_shard: Tensor, values: Tensor) -> DeltaEntry:
    """What verl's ``hf_delta_export`` makes of the changes of one share."""
    places = translate_flat_indices(places_in_shard, place) if places_in_shard.numel() else places_in_shard
    counts = torch.tensor([places.numel()], dtype=torch.int64)
    return [(name, spec.full_shape)], str(values.dtype).removeprefix("torch."), counts, places.to(torch.int32), values
