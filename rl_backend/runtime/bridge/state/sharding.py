"""Megatron's parameters as rectangles of Hugging Face's tensors: which rows a rank has, under which names."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn

from rl_backend.checkpoint.training_state import Box, TensorPieces, boxes
from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.bridge.model.conversion import Conversion
from rl_backend.runtime.bridge.model.output_heads import CriticOutputLayer
from rl_backend.runtime.bridge.state.stored_rows import StoredRows, keeps_rows, stored_rows

_EXPERT = re.compile(r"experts\.\d+")


class StoredNames:
    """Hugging Face names of what Megatron holds, for the conversions that only put rows in another order.

    Args:
        conversions: of the whole model.
        config: Megatron's ``TransformerConfig``.

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
        """The rows of one whole tensor, or of one expert of it; None where they are kept under Megatron's name.

        Rows that no entry has only pad a vocabulary.

        Args:
            tensor: of the model.
            key: Megatron's name of the whole tensor, by which the last stage's copy of tied embeddings is found.
            num_rows: of the whole tensor.
            expert: its number in the layer.
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
        sharded: the block in the whole tensor, as Megatron's checkpoints have it. The whole tensor has further dimensions in
            front (the expert), as many as ``prepend_axis_num`` says.
        tensor: of the model, the whole parameter or buffer.
        rows: of the whole tensor, or of the block's expert, in Hugging Face's; None where they have no place there.
    """

    sharded: ShardedTensor
    tensor: Tensor
    rows: tuple[StoredRows, ...] | None

    @property
    def start(self) -> int:
        """Of the block, in elements of the flattened tensor."""
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

    Args:
        flat: ``id`` of a tensor of the model -> start, end and the elements between them, flat: the tensor's own, or what an
            optimizer holds for them. Tensors that are not in it are left out.
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
    """A rectangle of a block, cut where its rows part in Hugging Face's tensors. Rows that pad a vocabulary are left out.

    Yields name and shape of a tensor of a checkpoint, and a rectangle of it with its first element's place in the block.
    """
    whole, prepended = block.sharded, block.sharded.prepend_axis_num
    offsets = tuple(a + b for a, b in zip(whole.global_offset, (0,) * prepended + box.offsets, strict=True))
    if block.rows is None:
        yield f"megatron.{whole.key}", tuple(whole.global_shape), Box(offsets, (1,) * prepended + box.sizes, box.start)
        return
    row, *others = offsets[prepended:]
    num_rows, *sizes = box.sizes
    for run in block.rows:
        first, last = max(row, run.start), min(row + num_rows, run.stop)
        if first < last:
            at = (run.at + first - run.start, *others)
            start = box.start + (first - row) * math.prod(sizes)
            yield run.name, run.shape, Box(at, (last - first, *sizes), start)


def _sharded_state(model: Any) -> Any:
    metadata = ensure_metadata_has_dp_cp_group(dict(_METADATA))
    if isinstance(getattr(model, "output_layer", None), CriticOutputLayer):
        # GPTModel's own insists on a language-model head.
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
    """Sharded tensors only: extra state of Transformer Engine's layers is made anew when a model is built."""
    if isinstance(tree, ShardedTensor | ShardedTensorFactory):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
