"""Megatron's parameters as rectangles of Hugging Face's tensors: which rows a rank has, under which names."""

import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    DirectMapping,
    GatedMLPMapping,
    GDNConv1dMapping,
    GDNLinearMapping,
    GDNLinearMappingSeparate,
    QKVMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn

from rl_backend.checkpoint.training_state import Box, TensorPieces, boxes
from rl_backend.contracts import TensorPart, UnsupportedError, WeightShard, dtype_from_name, export_dtype
from rl_backend.parallel.collectives import gather_objects
from rl_backend.parallel.shards import choose_senders, covers_once
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from rl_backend.runtime.bridge.model.conversion import Conversion
from rl_backend.runtime.bridge.model.output_heads import CriticOutputLayer
from rl_backend.runtime.export_stream import WeightStream

_AS_THEY_ARE = (AutoMapping, ColumnParallelMapping, DirectMapping, ReplicatedMapping, RowParallelMapping)
_DELTANET = (GDNConv1dMapping, GDNLinearMapping, GDNLinearMappingSeparate)
_IN_ANOTHER_ORDER = (GatedMLPMapping, QKVMapping, *_DELTANET)


class StoredRows(NamedTuple):
    """Rows that lie together in both: from ``start`` to ``stop`` in Megatron's tensor, which counts those of all
    tensor-parallel ranks, and from ``at`` on in the Hugging Face tensor ``name``.
    """

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]
    at: int


class _Run(NamedTuple):
    part: str  # Megatron-Bridge's name of the Hugging Face tensor among those of a parameter; empty for the only one
    at: int
    size: int


def keeps_rows(mapping: Any) -> bool:
    """Whether a mapping of Megatron-Bridge only puts rows in another order, one that is known here."""
    if type(mapping) in _AS_THEY_ARE:
        return not getattr(mapping, "permute_dims", None)
    return type(mapping) in _IN_ANOTHER_ORDER


def stored_rows(
    mapping: Any, block: str, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: Any
) -> tuple[StoredRows, ...]:
    """The rows of one ``block`` (Megatron's name in its checkpoints); ``names`` and ``shapes`` are by part."""
    found, start = [], 0
    for part, at, size in _runs(mapping, block.rpartition(".")[2], shapes, config):
        found.append(StoredRows(start, start + size, names[part], shapes[part], at))
        start += size
    return tuple(found)


def _runs(mapping: Any, block: str, shapes: Mapping[str, tuple[int, ...]], config: Any) -> Iterator[_Run]:
    if isinstance(mapping, QKVMapping):
        yield from _attention_runs(shapes, config)
    elif isinstance(mapping, _DELTANET):
        yield from _deltanet_runs(mapping, block, config)
    else:
        for part in ("gate", "up") if isinstance(mapping, GatedMLPMapping) else ("",):
            yield _Run(part, 0, shapes[part][0])


def _attention_runs(shapes: Mapping[str, tuple[int, ...]], config: Any) -> Iterator[_Run]:
    # Megatron keeps the queries of a group next to its key and value: tensor parallelism cuts between groups. Where
    # attention has a gate, Hugging Face has it behind the queries of each head, Megatron behind those of each group.
    heads = config.num_attention_heads
    groups = config.num_query_groups or heads
    per_group = heads // groups
    for group in range(groups):
        parts: tuple[str, ...] = ("q", "k", "v")
        if config.attention_output_gate:
            parts, dim = ("k", "v"), shapes["q"][0] // (2 * heads)
            for gate in (0, 1):
                for head in range(group * per_group, (group + 1) * per_group):
                    yield _Run("q", (2 * head + gate) * dim, dim)
        for part in parts:
            size = shapes[part][0] // groups
            yield _Run(part, group * size, size)


def _deltanet_runs(mapping: Any, block: str, config: Any) -> Iterator[_Run]:
    # Megatron saves the projection in six blocks and the convolution in three, each with the rows of all heads.
    heads = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // heads
    key, value = config.linear_key_head_dim, per_key * config.linear_value_head_dim
    if isinstance(mapping, GDNLinearMapping):
        # Key head by key head: its query, key, values and gates; the strengths and decays of its values.
        part, at, size, width = {
            "query": ("qkvz", 0, key, 2 * key + 2 * value),
            "key": ("qkvz", key, key, 2 * key + 2 * value),
            "value": ("qkvz", 2 * key, value, 2 * key + 2 * value),
            "z": ("qkvz", 2 * key + value, value, 2 * key + 2 * value),
            "beta": ("ba", 0, per_key, 2 * per_key),
            "alpha": ("ba", per_key, per_key, 2 * per_key),
        }[block]
        for head in range(heads):
            yield _Run(part, head * width + at, size)
        return
    qkv = "" if isinstance(mapping, GDNConv1dMapping) else "qkv"
    yield {
        "query": _Run(qkv, 0, heads * key),
        "key": _Run(qkv, heads * key, heads * key),
        "value": _Run(qkv, 2 * heads * key, heads * value),
        "z": _Run("z", 0, heads * value),
        "beta": _Run("b", 0, heads * per_key),
        "alpha": _Run("a", 0, heads * per_key),
    }[block]


_EXPERT = re.compile(r"experts\.\d+")


class StoredNames:
    """Hugging Face names of what Megatron holds, for the conversions that only put rows in another order.

    Attributes:
        private: Hugging Face names of parameters that are converted in other ways (experts stacked in one tensor, norms that
            add 1 to their weight): checkpoints hold them under Megatron's names.
    """

    def __init__(self, conversions: Sequence[Conversion], config: Any) -> None:
        self._config = config
        pairs = [(conversion, task) for conversion in conversions for task in conversion.tasks]
        self._by_tensor = {id(task.param_weight): pair for pair in pairs if (task := pair[1]).param_weight is not None}
        self._by_name = {task.global_param_name: (conversion, task) for conversion, task in pairs}
        self.private = tuple(
            name for conversion in conversions if not keeps_rows(conversion.tasks[0].mapping) for name in conversion.shapes
        )

    def rows(self, tensor: Tensor, key: str, num_rows: int, expert: int | None) -> tuple[StoredRows, ...] | None:
        """The rows of one whole tensor, or of one ``expert`` of it; None where they are kept under Megatron's name.

        Rows that no entry has only pad a vocabulary. ``key``: Megatron's name of the whole tensor, by which the last
        stage's copy of tied embeddings is found.
        """
        pair = self._by_tensor.get(id(tensor)) or self._by_name.get(key)
        if pair is None or not keeps_rows(pair[1].mapping):
            return None
        conversion, task = pair
        stored = task.mapping.hf_param
        names = {"": stored} if isinstance(stored, str) else dict(stored)
        if expert is not None:
            names = {part: _EXPERT.sub(f"experts.{expert}", name) for part, name in names.items()}
        shapes = {part: conversion.shapes[name] for part, name in names.items()}
        found = stored_rows(task.mapping, key, names, shapes, self._config)
        if found[-1].stop > num_rows:
            raise UnsupportedError(
                f"{key} has {num_rows} rows in Megatron, {', '.join(names.values())} have {found[-1].stop}", name=key
            )
        return found


_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


class Block(NamedTuple):
    """A parameter or buffer of this rank, or one of the blocks it consists of (gate and up of an MLP).

    Attributes:
        sharded: the block in the whole tensor, which has ``prepend_axis_num`` further dimensions in front (the expert).
        tensor: of the model, the whole parameter or buffer.
        rows: of the whole tensor, or of the block's expert, in Hugging Face's; None where they have no place there.
    """

    sharded: ShardedTensor
    tensor: Tensor
    rows: tuple[StoredRows, ...] | None

    @property
    def start(self) -> int:
        """In elements of the flattened tensor."""
        return int(self.sharded.data.storage_offset() - self.tensor.storage_offset())

    @property
    def writes(self) -> bool:
        """Whether this rank's copy is the one that is saved, apart from data-parallel copies."""
        replica = self.sharded.replica_id
        # The last number counts data-parallel ranks: each has a part of the optimizer's state.
        return not (isinstance(replica, tuple) and any(replica[:-1]))


def model_blocks(models: Sequence[nn.Module], names: StoredNames) -> list[Block]:
    """Every parameter and stored buffer of this rank's chunks."""
    return [block for model in models for entry in _leaves(_sharded_state(model)) for block in _blocks(entry, names)]


def pieces_of(blocks: Sequence[Block], flat: Mapping[int, tuple[int, int, Tensor]]) -> dict[str, TensorPieces]:
    """Pieces by the name that a checkpoint has for the whole tensor: Hugging Face's, or ``megatron.`` and Megatron's.
    ``flat``: ``id`` of a tensor of the model -> start, end and the elements between them, flat: the tensor's own, or what
    an optimizer holds for them. Tensors that are not in it are left out.
    """
    found: dict[str, TensorPieces] = {}
    for block in blocks:
        if id(block.tensor) not in flat:
            continue
        start, end, elements = flat[id(block.tensor)]
        # An optimizer's part begins and ends anywhere in the flattened tensor, even inside a row.
        shape = block.sharded.local_shape
        first, last = max(start, block.start), min(end, block.start + math.prod(shape))
        for box in boxes(shape, first - block.start, last - block.start):
            for name, whole, piece in _split(block, box):
                at = block.start + piece.start - start
                pieces = found.setdefault(name, TensorPieces(whole, {}, writes=block.writes)).pieces
                pieces[piece.offsets] = elements[at : at + math.prod(piece.sizes)].view(piece.sizes)
    return found


def _split(block: Block, box: Box) -> Iterator[tuple[str, tuple[int, ...], Box]]:
    """Name and shape of tensors of a checkpoint, and a rectangle of each with its first element's place in the block."""
    whole, prepended = block.sharded, block.sharded.prepend_axis_num
    offsets = tuple(a + b for a, b in zip(whole.global_offset, (0,) * prepended + box.offsets, strict=True))
    if block.rows is None:
        yield f"megatron.{whole.key}", tuple(whole.global_shape), Box(offsets, (1,) * prepended + box.sizes, box.start)
        return
    row, *others = offsets[prepended:]
    num_rows, *sizes = box.sizes
    # Cut where rows part. Those that no run has only pad a vocabulary.
    for run in block.rows:
        first, last = max(row, run.start), min(row + num_rows, run.stop)
        if first < last:
            at = (run.at + first - run.start, *others)
            start = box.start + (first - row) * math.prod(sizes)
            yield run.name, run.shape, Box(at, (last - first, *sizes), start)


def _sharded_state(model: Any) -> Any:
    metadata = ensure_metadata_has_dp_cp_group(dict(_METADATA))
    if isinstance(getattr(model, "output_layer", None), CriticOutputLayer):
        # The model's own insists on a language-model head.
        return MegatronModule.sharded_state_dict(model, metadata=metadata)
    return model.sharded_state_dict(metadata=metadata)


def _blocks(entry: ShardedTensor | ShardedTensorFactory, names: StoredNames) -> Iterator[Block]:
    for block in _leaves(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:
        assert isinstance(block, ShardedTensor), "a factory builds sharded tensors"
        if not block.data.is_contiguous():
            raise UnsupportedError(
                f"{block.key}: Megatron splits it for a checkpoint into blocks that do not lie together in memory, which "
                "the bridge runtime does not save",
                name=block.key,
            )
        experts = block.prepend_axis_num
        expert = block.global_offset[0] if experts else None
        yield Block(block, entry.data, names.rows(entry.data, block.key, block.global_shape[experts], expert))


def _leaves(tree: Any) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    # Sharded tensors only: extra state of Transformer Engine's layers is made anew when a model is built.
    if isinstance(tree, ShardedTensor | ShardedTensorFactory):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)


type Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Its first element in the tensor, and its shape."""

_SOURCE_RANK = 0


@dataclass(frozen=True)
class HeldParts:
    """Which rank sends which rectangle, the same on every rank.

    Attributes:
        senders: Hugging Face name -> rectangles that are the tensor once, each with the rank that sends it.
        gathered: names of weights that Megatron does not keep as rows of them, such as experts stacked in one tensor and
            norms that add 1: all ranks gather these, and rank 0 sends them.
    """

    senders: dict[str, dict[Rectangle, int]]
    gathered: frozenset[str]


def find_parts(handle: BridgeHandle) -> HeldParts:
    """A collective over all ranks. Of ranks that hold the same rectangle one sends it, so that all send about as much."""
    mine = [(name, rectangle) for name, found in _held(handle).items() for rectangle in found]
    holders: dict[str, dict[Rectangle, list[int]]] = {info.name: {} for info in handle.weights}
    for rank, of_rank in enumerate(gather_objects(mine, handle.groups.world_group)):
        for name, rectangle in of_rank:
            holders[name].setdefault(rectangle, []).append(rank)
    gathered = frozenset(info.name for info in handle.weights if not covers_once(info.shape, list(holders[info.name])))
    for info in handle.weights:
        if info.name in gathered:
            holders[info.name] = {((0,) * len(info.shape), info.shape): [_SOURCE_RANK]}
    flat = [(torch.Size(shape).numel(), ranks) for found in holders.values() for (_, shape), ranks in found.items()]
    chosen = iter(choose_senders(flat))
    return HeldParts({name: {each: next(chosen) for each in found} for name, found in holders.items()}, gathered)


def part_infos(handle: BridgeHandle, parts: HeldParts, dtype: torch.dtype | None) -> tuple[TensorPart, ...]:
    """What :func:`export_parts` yields on all ranks."""
    dtypes = _dtypes(handle, dtype)
    return tuple(
        TensorPart.of(info.name, shape, dtypes[info.name], whole=info.shape, start=start, rank=rank)
        for info in handle.weights
        for (start, shape), rank in parts.senders[info.name].items()
    )


def export_parts(
    handle: BridgeHandle, parts: HeldParts, dtype: torch.dtype | None, gathered: WeightStream
) -> Generator[WeightShard]:
    """The rectangles of every weight that this rank sends. ``gathered``: the collective stream of ``parts.gathered``."""
    dtypes, rank = _dtypes(handle, dtype), dist.get_rank()
    with closing(gathered), torch.no_grad():
        held = _held(handle)
        for info in handle.weights:
            if info.name in parts.gathered:
                _, whole = next(gathered)
                if rank == _SOURCE_RANK:
                    yield WeightShard(info.name, info.shape, (0,) * len(info.shape), whole)
                continue
            for rectangle, sender in parts.senders[info.name].items():
                if sender == rank:
                    tensor = held[info.name][rectangle].to(dtypes[info.name])
                    yield WeightShard(info.name, info.shape, rectangle[0], tensor)
        # To the end, where ranks agree that none has closed its stream.
        for _ in gathered:
            raise AssertionError("no more is gathered than is sent")


def _held(handle: BridgeHandle) -> dict[str, dict[Rectangle, Tensor]]:
    """Rectangles that this rank holds, by Hugging Face's names."""
    handle.finish_parameter_gathers()
    try:
        blocks = model_blocks(handle.models, StoredNames(handle.converter.conversions, handle.models[0].config))
    except UnsupportedError:
        # Blocks that do not lie together in memory: ranks gather what they are.
        return {}
    flat = {id(block.tensor): (0, block.tensor.numel(), block.tensor.detach().view(-1)) for block in blocks}
    names = {info.name for info in handle.weights}
    return {
        name: {(offsets, tuple(piece.shape)): piece for offsets, piece in found.pieces.items()}
        for name, found in pieces_of(blocks, flat).items()
        if name in names
    }


def _dtypes(handle: BridgeHandle, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    own = {info.name: dtype_from_name(info.dtype) for info in handle.weights}
    if dtype is None:
        return own
    return {name: export_dtype(dtype, in_float32=name in handle.in_float32) for name in own}
