"""Where this rank's tensors lie in the whole ones, as Megatron's sharded state dict tells it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn

from rl_backend.checkpoint.pieces import TensorPieces, boxes
from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.bridge.outputs import CriticOutputLayer

_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}


@dataclass(frozen=True)
class Placed:
    """A parameter or buffer of this rank, or one of the blocks it consists of (gate and up of an MLP).

    Attributes:
        key: Megatron's name of the whole tensor, the same in every layout.
        tensor: of the model, the whole parameter or buffer.
        start: of the block, in elements of the flattened tensor.
        shape: of the block.
        whole_shape: of the whole tensor, with a dimension in front for each of ``prepended``.
        offsets: of the block in the whole tensor.
        prepended: dimensions of the whole tensor that the block does not have (the expert).
        writes: this rank's copy is the one that is saved, but for data-parallel copies.
    """

    key: str
    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    prepended: int
    writes: bool


def placed_tensors(models: Sequence[nn.Module]) -> list[Placed]:
    """Every parameter and stored buffer of this rank's chunks."""
    return [placed for model in models for entry in _leaves(_sharded_state(model)) for placed in _placed(entry)]


def pieces_of(placed: Sequence[Placed], flat: Mapping[int, tuple[int, int, Tensor]]) -> dict[str, TensorPieces]:
    """Pieces by key.

    Args:
        flat: ``id`` of a tensor of the model -> start, end and the elements between them, flat: the tensor's own, or what an
            optimizer holds for them. Tensors that are not in it are left out.
    """
    found: dict[str, TensorPieces] = {}
    for each in placed:
        if id(each.tensor) not in flat:
            continue
        start, end, elements = flat[id(each.tensor)]
        size = math.prod(each.shape)
        first, last = max(start, each.start), min(end, each.start + size)
        pieces = found.setdefault(each.key, TensorPieces(each.whole_shape, {}, writes=each.writes)).pieces
        for box in boxes(each.shape, first - each.start, last - each.start):
            at = each.start + box.start - start
            offsets = (0,) * each.prepended + box.offsets
            pieces[tuple(a + b for a, b in zip(each.offsets, offsets, strict=True))] = elements[
                at : at + math.prod(box.sizes)
            ].view((1,) * each.prepended + box.sizes)
    return found


def _sharded_state(model: Any) -> Any:
    metadata = ensure_metadata_has_dp_cp_group(dict(_METADATA))
    if isinstance(getattr(model, "output_layer", None), CriticOutputLayer):
        # GPTModel's own insists on a language-model head.
        return MegatronModule.sharded_state_dict(model, metadata=metadata)
    return model.sharded_state_dict(metadata=metadata)


def _placed(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[Placed]:
    blocks = list(_leaves(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
    for block in blocks:
        assert isinstance(block, ShardedTensor), "a factory builds sharded tensors"
        if not block.data.is_contiguous():
            raise UnsupportedError(
                f"{block.key}: Megatron splits it for a checkpoint into blocks that do not lie together in memory, which "
                "the bridge runtime does not save",
                name=block.key,
            )
        replica = block.replica_id if isinstance(block.replica_id, tuple) else (block.replica_id,)
        yield Placed(
            key=block.key,
            tensor=entry.data,
            start=block.data.storage_offset() - entry.data.storage_offset(),
            shape=tuple(block.local_shape),
            whole_shape=tuple(block.global_shape),
            offsets=tuple(block.global_offset),
            prepended=block.prepend_axis_num,
            # The last number counts data-parallel ranks: each has a part of the optimizer's state.
            writes=not any(replica[:-1]),
        )


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
