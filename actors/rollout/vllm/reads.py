"""What a worker's loaders read of whole tensors, and tensors that stand for whole ones of which a worker has that alone.

vLLM's loaders take whole tensors and read, by views of them, what their worker keeps: its rows, columns, experts or heads.
A :class:`StandIn` has the shape of the whole. Views of it are views of its place; whatever asks for its elements asks
``elements`` for those at that place. While reads are recorded there are none, and the model's parameters are on the meta
device: what is asked for is noted. So no family of models has a table here, and what is fused, padded, replicated, or one
worker's alone, is as vLLM's loaders have it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from rl_backend.contracts import TensorInfo, TensorTile, WeightCheckError, dtype_from_name
from rl_backend.contracts.weights import Box, box_at
from rl_backend.weights.staging import read_tensor
from rl_backend.weights.tiles import common_box, is_in, slices_in, whole_box

logger = logging.getLogger(__name__)


class Elements(Protocol):
    """Where a stand-in's elements come from."""

    device: torch.device

    def at(self, place: Tensor) -> Tensor:
        """The elements of ``place``, a view of the whole tensor on the meta device, in its shape."""


class StandIn(Tensor):
    """Stands for a whole tensor; ``place`` is what a view of it covers, on the meta device."""

    elements: Elements
    place: Tensor

    @staticmethod
    def __new__(cls, elements: Elements, place: Tensor) -> StandIn:
        made = Tensor._make_wrapper_subclass(
            cls,
            place.shape,
            strides=place.stride(),
            storage_offset=place.storage_offset(),
            dtype=place.dtype,
            device=elements.device,
        )
        made.elements, made.place = elements, place
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func) and isinstance(args[0], StandIn):
            whole = args[0]
            places = func(whole.place, *args[1:], **kwargs)
            # Some that may be views copy what they cannot see so, or take the bits for another dtype's.
            if all(_is_view_of(place, whole.place) for place in tree_iter(places)):
                return tree_map_only(Tensor, lambda place: StandIn(whole.elements, place), places)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], StandIn):
            target, source = args[:2]
            found = source.elements.at(source.place)
            # Loaders are run on the meta device first, to count; and parameters that vLLM leaves in their place keep what
            # they hold while reads are recorded.
            if not target.is_meta and not found.is_meta:
                target.copy_(found)
            return target
        with_elements = tree_map_only(StandIn, lambda one: one.elements.at(one.place), (args, kwargs))
        # On the meta device this raises where values are asked for.
        result = func(*with_elements[0], **with_elements[1])
        # What is computed of no elements has none either.
        return tree_map_only(Tensor, lambda one: StandIn(_NOTHING, one) if one.is_meta else one, result)


class _Nothing:
    """What is computed while reads are recorded: that its parts are read is known."""

    device = torch.device("meta")

    def at(self, place: Tensor) -> Tensor:
        return place


_NOTHING = _Nothing()


class _Recorded:
    """The reads of one tensor."""

    device = torch.device("meta")

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape
        self.boxes: set[Box] = set()

    def at(self, place: Tensor) -> Tensor:
        if place.numel():
            self.boxes.add(box_of(place, self.shape) or whole_box(self.shape))
        return place


class HeldElements:
    """Rectangles of a tensor, by their first elements, as those of its elements that there are.

    Raises:
        WeightCheckError: others are asked for.
    """

    def __init__(self, name: str, shape: Sequence[int], tiles: Mapping[tuple[int, ...], Tensor]) -> None:
        self._name, self._shape, self._tiles = name, shape, tiles
        self._dtype = next(iter(tiles.values())).dtype
        self.device = next(iter(tiles.values())).device

    def at(self, place: Tensor) -> Tensor:
        if not place.numel():
            return torch.empty(place.shape, dtype=place.dtype, device=self.device)
        found = box_of(place, self._shape)
        box = found or whole_box(self._shape)
        start, held = next(
            ((each, tile) for each, tile in self._tiles.items() if is_in(box, box_at(each, tile.shape))), (None, None)
        )
        if start is None or held is None:
            start, held = tuple(first for first, _ in box), self._put_together(box)
        if not held.is_contiguous():
            # Dimensions of a view may run over several of the rectangle's.
            start, held = tuple(first for first, _ in box), held[slices_in(box, start)].contiguous()
        origin = _indices(int(place.storage_offset()), _strides(self._shape))
        offset = sum((index - first) * stride for index, first, stride in zip(origin, start, held.stride(), strict=True))
        strides = [_stride_in(held, stride, self._shape) for stride in place.stride()]
        return held.as_strided(place.shape, strides, held.storage_offset() + offset)

    def _put_together(self, box: Box) -> Tensor:
        whole = torch.empty([end - first for first, end in box], dtype=self._dtype, device=self.device)
        missing = whole.numel()
        for start, tile in self._tiles.items():
            common = common_box(box, box_at(start, tile.shape))
            if common is not None:
                part = whole[slices_in(common, tuple(first for first, _ in box))]
                part.copy_(tile[slices_in(common, start)])
                missing -= part.numel()
        if missing:
            raise WeightCheckError(
                f"{self._name}: a loader reads {list(box)}, of which this worker was not sent {missing} elements: what its "
                "loaders read has changed since it was recorded; restart the engine",
                name=self._name,
            )
        return whole


def stand_ins(tiles: Sequence[TensorTile], buffer: Tensor, worker: int) -> Iterator[tuple[str, Tensor]]:
    """(name, stand-in) of each tensor of which ``worker`` has tiles, in order; the tiles are in a (N,) uint8 buffer."""
    for name, of_tensor in itertools.groupby(tiles, lambda tile: tile.tensor):
        own = [tile for tile in of_tensor if worker in tile.workers]
        if own:
            held = HeldElements(name, own[0].whole, {tile.start: read_tensor(buffer, tile) for tile in own})
            yield name, StandIn(held, torch.empty(own[0].whole, dtype=dtype_from_name(own[0].dtype), device="meta"))


def box_of(place: Tensor, shape: Sequence[int]) -> Box | None:
    """The rectangle of a contiguous tensor of ``shape`` whose elements a view of it has; None where they are none."""
    steps = [(size, step) for size, step in zip(place.shape, place.stride(), strict=True) if size > 1 and step]
    strides = _strides(shape)
    first = _indices(int(place.storage_offset()), strides)
    last = _indices(int(place.storage_offset()) + sum((size - 1) * step for size, step in steps), strides)
    box = tuple((one, other + 1) for one, other in zip(first, last, strict=True))
    sizes = [end - start for start, end in box]
    # Equal runs of equal steps reach equal elements.
    same = min(sizes, default=1) > 0 and _runs(steps) == _runs(list(zip(sizes, strides, strict=True)))
    return box if same else None


def record_reads(model: nn.Module, infos: Sequence[TensorInfo]) -> dict[str, tuple[Box, ...]]:
    """What this worker's loaders read of each of ``infos``: rectangles, none of a tensor that it has no part of.

    The model is as it was afterwards. It must not run meanwhile. Where loaders cannot be followed, as they decide by values
    what to read, all tensors are read whole, and a warning says why.
    """
    reads = {info.name: _Recorded(info.shape) for info in infos}
    recorded = (
        (info.name, StandIn(reads[info.name], torch.empty(info.shape, dtype=dtype_from_name(info.dtype), device="meta")))
        for info in infos
    )
    try:
        with torch.no_grad(), _on_meta(model):
            model.load_weights(recorded)  # type: ignore[operator]
    except (NotImplementedError, RuntimeError, TypeError) as error:
        logger.warning(
            "what vLLM's loaders of %s read cannot be recorded, so each worker is sent all weights: %s: %s",
            type(model).__name__,
            type(error).__name__,
            error,
        )
        return {info.name: (whole_box(info.shape),) for info in infos}
    return {name: tuple(sorted(found.boxes)) for name, found in reads.items()}


@contextmanager
def _on_meta(model: nn.Module) -> Iterator[None]:
    """Parameters of the shapes that loaders fill, on the meta device, and afterwards those that the model had."""
    replaced = []
    try:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            replaced.append((layer, info))
            restore_layer_on_meta(layer, info)
        yield
    finally:
        for layer, info in replaced:
            _place_kernel_tensors(layer, info)
            info.reset()


def _is_view_of(place: Tensor, whole: Tensor) -> bool:
    return place.dtype == whole.dtype and place.untyped_storage()._cdata == whole.untyped_storage()._cdata


def _is_view(func: Any) -> bool:
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _strides(shape: Sequence[int]) -> list[int]:
    """Of a contiguous tensor."""
    return [*itertools.accumulate(reversed(shape[1:]), lambda one, other: one * max(other, 1), initial=1)][::-1][
        : len(shape)
    ]


def _indices(offset: int, strides: Iterable[int]) -> list[int]:
    found = []
    for stride in strides:
        index, offset = divmod(offset, stride)
        found.append(index)
    return found


def _runs(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(number, step) of elements from the largest step on, without those of one, and with steps that continue as one."""
    joined: list[tuple[int, int]] = []
    for size, step in sorted((each for each in steps if each[0] > 1), key=lambda each: -each[1]):
        if joined and joined[-1][1] == size * step:
            size *= joined.pop()[0]
        joined.append((size, step))
    return joined


def _stride_in(held: Tensor, stride: int, shape: Sequence[int]) -> int:
    """What a step of ``stride`` elements in a contiguous tensor of ``shape`` is in a rectangle of it."""
    for size, step, own in zip(shape, _strides(shape), held.stride(), strict=True):
        if size > 1 and step <= stride:
            return stride // step * own
    return 0
