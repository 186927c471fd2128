"""Exports: full weights and gradients, gathered from shards bucket by bucket, and the shards themselves."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import TensorPart, WeightName, WeightShard, export_dtype, stored_names, stored_tensors
from rl_backend.parallel.collectives import all_gather_into
from rl_backend.parallel.shards import Region, ShardLayout, choose_senders, local_region, local_tensor
from rl_backend.runtime.export_stream import WeightStream, plan_buckets, require_known_names, start_stream
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import TensorLayout

_SMALL_BYTES = 1 << 16


def export_weights(
    handle: NativeHandle, dtype: torch.dtype | None, byte_budget: int | None, only: Collection[str] | None
) -> WeightStream:
    """Checks the arguments, then returns the generator that gathers, one bucket after the other.

    Args:
        byte_budget: bytes of full tensors in one bucket; None gathers one tensor at a time. On top come padding (at most an
            eighth, or 64 KiB) and the tensor that is being put together.
        only: Hugging Face names; None exports all.

    Raises:
        ConfigError: an unknown name, or a budget smaller than the largest tensor.
    """
    require_known_names("export_weights", only, stored_names(handle.weight_names))
    weights = sharded_weights(handle.parameters, handle.weight_names, handle.layouts, dtype=dtype, only=only)
    return _start(weights, handle, byte_budget)


def export_shards(handle: NativeHandle, dtype: torch.dtype | None) -> Iterator[WeightShard]:
    """This rank's part of every weight, without parts that another rank sends. Not a collective."""
    for weight in sharded_weights(handle.parameters, handle.weight_names, handle.layouts, dtype=dtype, only=None):
        mine = next((part for part in weight.parts if part.rank == dist.get_rank()), None)
        if mine is None:
            nothing = torch.empty(0, dtype=weight.dtype, device=handle.groups.device)
            yield WeightShard(weight.name, weight.shape, (0,) * len(weight.shape), nothing)
        else:
            yield WeightShard(weight.name, weight.shape, mine.start, weight.held().to(weight.dtype))


def shard_infos(handle: NativeHandle, dtype: torch.dtype | None) -> tuple[TensorPart, ...]:
    """What :func:`export_shards` gives on all ranks."""
    weights = sharded_weights({}, handle.weight_names, handle.layouts, dtype=dtype, only=None)
    return tuple(
        TensorPart.of(weight.name, part.shape, weight.dtype, whole=weight.shape, start=part.start, rank=part.rank)
        for weight in weights
        for part in weight.parts
    )


def export_gradients(handle: NativeHandle, only: Collection[str] | None) -> WeightStream:
    """As :func:`export_weights` for the gradients, in float32; parameters that have none on any rank are left out."""
    names, parameters, groups = handle.weight_names, handle.parameters, handle.groups
    require_known_names("export_gradients", only, stored_names(names))
    here = [key in parameters and parameters[key].grad is not None for key in names]
    # A weight may have a gradient on some ranks only; all must gather the same list.
    present = torch.tensor(here, dtype=torch.int32, device=groups.device)
    if groups.world_size > 1:
        dist.all_reduce(present, dist.ReduceOp.MAX, group=groups.world_group)
    reached = {key: name for (key, name), there in zip(names.items(), present.tolist(), strict=True) if there}
    if not reached:
        handle.require_gradients("export_gradients")
    gradients: dict[str, Tensor] = {}
    for key in reached.keys() & parameters.keys():
        gradient = parameters[key].grad
        gradients[key] = torch.zeros_like(parameters[key], requires_grad=False) if gradient is None else gradient
    return _start(sharded_weights(gradients, reached, handle.layouts, dtype=torch.float32, only=only), handle, None)


class Part(NamedTuple):
    """A rectangle of a weight, and the global rank that sends it."""

    rank: int
    region: Region

    @property
    def start(self) -> tuple[int, ...]:
        return tuple(part.start for part in self.region)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.region)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardedWeight:
    """A parameter or its gradient, or one of the tensors that are packed in it."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor that is gathered
    dtype: torch.dtype  # of the whole tensor that is gathered
    parts: tuple[Part, ...]  # together the whole weight once
    tensor: Tensor | None  # this rank's parameter or gradient; None on ranks of other pipeline stages
    place: tuple[int, ...]  # of the weight in the first dimensions of this rank's part of ``tensor``; empty for all of it

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return self.name

    def held(self) -> Tensor:
        assert self.tensor is not None, "asked of a rank that has a part"
        return local_tensor(self.tensor)[self.place]


def _start(weights: Sequence[ShardedWeight], handle: NativeHandle, byte_budget: int | None) -> WeightStream:
    group, device = handle.groups.world_group, handle.groups.device
    gather = partial(gather_weights, group=group, device=device)
    return start_stream(plan_buckets(weights, byte_budget), gather, group, device)


def sharded_weights(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, WeightName],
    layouts: Mapping[str, TensorLayout],
    *,
    dtype: torch.dtype | None,
    only: Collection[str] | None,
) -> list[ShardedWeight]:
    """Every Hugging Face tensor of ``names``, or those of ``only``, in order, the same on every rank. Not a collective.

    Of ranks that have copies of a rectangle one sends it, so that all send about equally much.

    Args:
        tensors: name in the module -> parameter or gradient, of those that this rank has.
        layouts: of all of ``names``.
        dtype: None takes the parameters'. Those that are computed with in float32 are exported in no less.
    """
    weights: list[ShardedWeight] = []
    rectangles: list[list[_Rectangle]] = []
    for key, name in names.items():
        wanted = [(index, stored) for index, stored in stored_tensors(name) if only is None or stored in only]
        if not wanted:
            continue
        layout, num_packed = layouts[key], len(wanted[0][0])
        shape, found, tensor = layout.shards.shape[num_packed:], _rectangles(layout.shards, num_packed), tensors.get(key)
        first = () if tensor is None else local_region(tensor)
        exported = layout.dtype if dtype is None else export_dtype(dtype, in_float32=layout.in_float32)
        for index, stored in wanted:
            place = tuple(number - part.start for number, part in zip(index, first, strict=False))
            weights.append(ShardedWeight(stored, shape, exported, (), tensor, place))
            rectangles.append(found[index])
    every = list(itertools.chain.from_iterable(rectangles))
    senders = iter(choose_senders([(Part(0, region).numel, ranks) for region, ranks in every]))
    return [
        replace(weight, parts=tuple(Part(next(senders), region) for region, _ in of_weight))
        for weight, of_weight in zip(weights, rectangles, strict=True)
    ]


type _Rectangle = tuple[Region, Sequence[int]]  # with the ranks that have it


@lru_cache(256)  # layers are alike
def _rectangles(layout: ShardLayout, num_packed: int) -> dict[tuple[int, ...], list[_Rectangle]]:
    """Those of each weight, by its place in the first ``num_packed`` dimensions."""
    found: dict[tuple[int, ...], list[_Rectangle]] = {
        index: [] for index in itertools.product(*map(range, layout.shape[:num_packed]))
    }
    for region, ranks in layout.copies().items():
        packed, inner = region[:num_packed], region[num_packed:]
        for index in itertools.product(*(range(part.start, part.stop) for part in packed)):
            found[index].append((inner, ranks))
    return found


def gather_weights(
    weights: Sequence[ShardedWeight], group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor) of weights of one dtype. A collective over ``group``, all of it before the first tensor.

    A tensor may be a view of what was received.
    """
    if group.size() == 1:
        for weight in weights:
            yield weight.name, weight.held().to(weight.dtype)
        return
    places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
    # Parts of one rank lie end to end in its buffer, in the order of the weights; every rank computes the same places.
    sizes, starts = [0] * len(places), [[0] * len(weight.parts) for weight in weights]
    for weight, of_parts in zip(weights, starts, strict=True):
        for index, part in enumerate(weight.parts):
            of_parts[index] = sizes[places[part.rank]]
            sizes[places[part.rank]] += part.numel

    def pack(buffer: Tensor) -> None:
        for weight, of_parts in zip(weights, starts, strict=True):
            for part, start in zip(weight.parts, of_parts, strict=True):
                if places[part.rank] == group.rank():
                    buffer[start : start + part.numel].view(part.shape).copy_(weight.held())

    received = _exchange(sizes, pack, weights[0].dtype, group, device)
    for weight, of_parts in zip(weights, starts, strict=True):
        yield weight.name, _assemble(weight, of_parts, received, places)


def _exchange(
    sizes: Sequence[int], pack: Callable[[Tensor], None], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> Tensor | list[Tensor]:
    """The buffer of each rank; (ranks, longest buffer) where they are about equally long."""
    padded, exact = max(sizes) * len(sizes), sum(sizes)
    # Parts padded to the longest take little more than the weights: an eighth, or what nobody notices.
    if padded <= exact + exact // 8 or padded * dtype.itemsize <= _SMALL_BYTES:
        mine = torch.empty(max(sizes), dtype=dtype, device=device)
        pack(mine)
        gathered = torch.empty(len(sizes), max(sizes), dtype=dtype, device=device)
        if gathered.numel():
            all_gather_into(gathered.view(-1), mine, group=group)
        return gathered
    # Where most of an all-gather would be padding, one broadcast from each rank that has something.
    buffers = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
    pack(buffers[group.rank()])
    for place, buffer in enumerate(buffers):
        if buffer.numel():
            dist.broadcast(buffer, group=group, group_src=place)
    return buffers


def _assemble(
    weight: ShardedWeight, starts: Sequence[int], received: Tensor | list[Tensor], places: Mapping[int, int]
) -> Tensor:
    # Rows that FSDP2 cut in the order of the ranks are whole as soon as they are beside each other, without a second buffer.
    if isinstance(received, Tensor) and _follows_ranks(weight, starts, places):
        flat = received[:, starts[0] : starts[0] + weight.parts[0].numel].reshape(-1)
        return flat[: weight.numel].view(weight.shape)
    pieces = [
        received[places[part.rank]][start : start + part.numel].view(part.shape)
        for part, start in zip(weight.parts, starts, strict=True)
    ]
    if len(pieces) == 1:
        return pieces[0]
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=received[0].device)
    for part, piece in zip(weight.parts, pieces, strict=True):
        whole[part.region].copy_(piece)
    return whole


def _follows_ranks(weight: ShardedWeight, starts: Sequence[int], places: Mapping[int, int]) -> bool:
    """Whether the parts are equal numbers of the weight's rows in the order of the ranks, at one place in every buffer."""
    parts = weight.parts
    if len(parts) < 2:
        return False
    rows = [part.region[0].start for part in parts]
    return (
        [places[part.rank] for part in parts] == list(range(len(parts)))
        and set(starts) == {starts[0]}
        and rows == sorted(rows)
        and all(part.shape[1:] == weight.shape[1:] for part in parts)
        and all(part.numel == parts[0].numel for part in parts[:-1])
    )
