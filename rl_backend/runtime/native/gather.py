"""Whole tensors on every rank out of the parts that ranks have of them, many in one collective."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import UnsupportedError, WeightName, stored_tensors
from rl_backend.parallel.collectives import all_gather_into
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.shards import Region, ShardLayout, layout_of, local_region, local_tensor

_SMALL_BYTES = 1 << 16


class TensorLayout(NamedTuple):
    """What every rank knows of a parameter, even of one of another pipeline stage."""

    shards: ShardLayout
    dtype: torch.dtype


class Part(NamedTuple):
    """A rectangle of a weight, and the global rank that sends it."""

    rank: int
    region: Region

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.region)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardedWeight:
    """A parameter or its gradient, or one of the tensors that are packed in it.

    Attributes:
        shape, dtype: of the whole tensor that is gathered.
        parts: together the whole weight once.
        tensor: this rank's parameter or gradient; None on ranks of other pipeline stages.
        place: of the weight in the first dimensions of this rank's part of ``tensor``; empty for all of it. Of no use on a
            rank that has no part of the weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    tensor: Tensor | None
    place: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return self.name

    def held(self) -> Tensor:
        """This rank's part of the weight, in the dtype of ``tensor``."""
        assert self.tensor is not None, "asked of a rank that has a part"
        return local_tensor(self.tensor)[self.place]


def model_layouts(parameters: Mapping[str, Tensor], groups: ParallelGroups) -> dict[str, TensorLayout]:
    """The layout of every parameter of the model. With a pipeline a collective over its stages.

    Args:
        parameters: name in the module -> parameter of this rank.

    Raises:
        UnsupportedError: a parameter that is not laid out over all ranks of its stage, on these.
    """
    ranks = groups.mesh.mesh.flatten().tolist()
    layouts = {name: TensorLayout(layout_of(value), value.dtype) for name, value in parameters.items()}
    for name, layout in layouts.items():
        if sorted(layout.shards.ranks) != sorted(ranks):
            raise UnsupportedError(
                f"{name} is laid out over the ranks {layout.shards.ranks} of {tuple(ranks)}; parallelize must lay it out "
                "over all of them, as copies where it is not cut, so that every rank knows where it is",
                parameter=name,
            )
    if groups.pp_group.size() == 1:
        return layouts
    stages: list[dict[str, TensorLayout]] = [{} for _ in range(groups.pp_group.size())]
    dist.all_gather_object(stages, layouts, group=groups.pp_group)
    return {name: layout for stage in stages for name, layout in stage.items()}


def sharded_weights(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, WeightName],
    layouts: Mapping[str, TensorLayout],
    *,
    dtype: torch.dtype | None,
    only: Collection[str] | None,
) -> list[ShardedWeight]:
    """Every Hugging Face tensor of ``names``, or those of ``only``, in order. Not a collective, and the same on every rank.

    Args:
        tensors: name in the module -> parameter or gradient, of those that this rank has.
        layouts: of all of ``names``.
        dtype: None takes the parameters'.
    """
    weights = []
    for key, name in names.items():
        wanted = [(index, stored) for index, stored in stored_tensors(name) if only is None or stored in only]
        if not wanted:
            continue
        layout, num_packed = layouts[key], len(wanted[0][0])
        shape, parts, tensor = layout.shards.shape[num_packed:], _parts(layout.shards, num_packed), tensors.get(key)
        first = () if tensor is None else local_region(tensor)
        for index, stored in wanted:
            place = tuple(number - part.start for number, part in zip(index, first, strict=False))
            weights.append(ShardedWeight(stored, shape, dtype or layout.dtype, parts[index], tensor, place))
    return weights


def _parts(layout: ShardLayout, num_packed: int) -> dict[tuple[int, ...], tuple[Part, ...]]:
    """Parts by the place of a weight in the first ``num_packed`` dimensions."""
    found: dict[tuple[int, ...], list[Part]] = {
        index: [] for index in itertools.product(*map(range, layout.shape[:num_packed]))
    }
    for rank, region in layout.parts():
        packed, inner = region[:num_packed], region[num_packed:]
        for index in itertools.product(*(range(part.start, part.stop) for part in packed)):
            found[index].append(Part(rank, inner))
    return {index: tuple(parts) for index, parts in found.items()}


def gather_weights(
    weights: Sequence[ShardedWeight], group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor) of weights of one dtype. A collective over ``group``, all of it before the first tensor.

    One all-gather where the ranks have about as much of the weights each. Otherwise, where most of it would be padding, one
    broadcast from each rank that has something: a rank receives the weights once and nothing else. A tensor may be a view of
    what was received.
    """
    if group.size() == 1:
        for weight in weights:
            yield weight.name, weight.held().to(weight.dtype)
        return
    plan = _Plan(weights, group)
    received = _all_gather(plan, device) if plan.is_even else _broadcast(plan, device)
    for weight, starts in zip(weights, plan.starts, strict=True):
        yield weight.name, _assemble(weight, starts, received, plan)


class _Plan:
    """Where each part lies in the flat buffer that its rank sends.

    Attributes:
        places: global rank -> place in the group.
        starts: for each weight, the first element of each of its parts in the buffer of the part's rank.
        sizes: elements of the buffer of each rank.
    """

    def __init__(self, weights: Sequence[ShardedWeight], group: dist.ProcessGroup) -> None:
        self.weights = weights
        self.group = group
        self.dtype = weights[0].dtype
        self.places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
        self.sizes = [0] * len(self.places)
        self.starts: list[list[int]] = []
        for weight in weights:
            starts = []
            for part in weight.parts:
                place = self.places[part.rank]
                starts.append(self.sizes[place])
                self.sizes[place] += part.numel
            self.starts.append(starts)

    @property
    def is_even(self) -> bool:
        """Whether parts padded to the longest take little more than the weights: an eighth, or what nobody notices."""
        padded, exact = max(self.sizes) * len(self.sizes), sum(self.sizes)
        return padded <= exact + exact // 8 or padded * self.dtype.itemsize <= _SMALL_BYTES

    def pack(self, buffer: Tensor) -> None:
        """Copies what this rank sends into ``buffer``."""
        mine = self.group.rank()
        for weight, starts in zip(self.weights, self.starts, strict=True):
            for part, start in zip(weight.parts, starts, strict=True):
                if self.places[part.rank] == mine:
                    buffer[start : start + part.numel].view(part.shape).copy_(weight.held())


def _all_gather(plan: _Plan, device: torch.device) -> Tensor:
    """(ranks, longest buffer)"""
    longest = max(plan.sizes)
    mine = torch.empty(longest, dtype=plan.dtype, device=device)
    plan.pack(mine)
    gathered = torch.empty(len(plan.sizes), longest, dtype=plan.dtype, device=device)
    if longest:
        all_gather_into(gathered.view(-1), mine, group=plan.group)
    return gathered


def _broadcast(plan: _Plan, device: torch.device) -> list[Tensor]:
    """The buffer of each rank."""
    buffers = [torch.empty(size, dtype=plan.dtype, device=device) for size in plan.sizes]
    plan.pack(buffers[plan.group.rank()])
    for place, buffer in enumerate(buffers):
        if buffer.numel():
            dist.broadcast(buffer, group=plan.group, group_src=place)
    return buffers


def _assemble(weight: ShardedWeight, starts: Sequence[int], received: Tensor | list[Tensor], plan: _Plan) -> Tensor:
    if isinstance(received, Tensor) and _follows_ranks(weight, starts, plan):
        flat = received[:, starts[0] : starts[0] + weight.parts[0].numel].reshape(-1)
        return flat[: weight.numel].view(weight.shape)
    pieces = [
        received[plan.places[part.rank]][start : start + part.numel].view(part.shape)
        for part, start in zip(weight.parts, starts, strict=True)
    ]
    if len(pieces) == 1:
        return pieces[0]
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=received[0].device)
    for part, piece in zip(weight.parts, pieces, strict=True):
        whole[part.region].copy_(piece)
    return whole


def _follows_ranks(weight: ShardedWeight, starts: Sequence[int], plan: _Plan) -> bool:
    """Whether the parts are equal numbers of the weight's rows in the order of the ranks, at one place in every buffer."""
    parts = weight.parts
    if len(parts) < 2:
        return False
    rows = [part.region[0].start for part in parts]
    return (
        [plan.places[part.rank] for part in parts] == list(range(len(parts)))
        and set(starts) == {starts[0]}
        and rows == sorted(rows)
        and all(part.shape[1:] == weight.shape[1:] for part in parts)
        and all(part.numel == parts[0].numel for part in parts[:-1])
    )
