"""Tiles: the rectangles of a tensor that an engine's workers read, each with a place of its own in a staging buffer."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rl_backend.contracts import TensorInfo, TensorPart, TensorTile, WeightCheckError, WeightManifest
from rl_backend.contracts.errors import listed
from rl_backend.contracts.weights import Box, box_at, rectangle_text

type Reads = Mapping[str, Sequence[Box]]
"""What a worker's loaders read of each tensor, by name; nothing of a tensor that it has no part of."""


def plan_tiles(infos: Sequence[TensorInfo], workers: Sequence[Reads]) -> tuple[TensorTile, ...]:
    """What workers read of tensors, every element once: a tensor is cut where what one of them reads begins or ends.

    What nobody reads is in no tile. Of another shape than the one that was read a tensor is one tile, of all workers: the
    engine refuses it, and says why.
    """
    return tuple(TensorTile.cut(info, cell, readers) for info in infos for cell, readers in _cells_of(info, workers))


def _cells_of(info: TensorInfo, workers: Sequence[Reads]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Each tile's rectangle, and who reads it."""
    boxes = [reads.get(info.name, ()) for reads in workers]
    every = {box for of_worker in boxes for box in of_worker}
    if not every:
        return
    if not all(is_in(box, whole_box(info.shape)) for box in every):
        every = {whole_box(info.shape)}
        boxes = [tuple(every)] * len(boxes)
    edges = [sorted({edge for box in every for edge in box[dim]}) for dim in range(len(info.shape))]
    for cell in itertools.product(*map(itertools.pairwise, edges)):
        if readers := tuple(worker for worker, own in enumerate(boxes) if any(is_in(cell, box) for box in own)):
            yield cell, readers


class TileMap:
    """Tiles by the tensor that they are of."""

    def __init__(self, tiles: Sequence[TensorTile]) -> None:
        self._tiles: dict[str, list[TensorTile]] = defaultdict(list)
        for tile in tiles:
            self._tiles[tile.tensor].append(tile)

    def pieces(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[TensorTile, Box]]:
        """The tiles that a rectangle of the tensor ``name`` has elements of, and the rectangle in the tensor of these."""
        box = box_at(start, shape)
        for tile in self._tiles.get(name, ()):
            common = common_box(box, tile.box)
            if common is not None:
                yield tile, common

    def cut_parts(self, parts: Sequence[TensorPart]) -> Iterator[TensorPart]:
        """Rectangles of tensors as rectangles of tiles, in their order."""
        for part in parts:
            for tile, box in self.pieces(part.name, part.start, part.shape):
                yield tile.part(box, part.rank)


def require_tiles(manifest: WeightManifest, workers: Sequence[Reads], *, engine: str) -> None:
    """Proves that each worker gets what it reads; raises :class:`WeightCheckError` naming tiles that differ."""
    planned = {
        (rectangle_text(info.name, cell), readers) for info in manifest.tensors for cell, readers in _cells_of(info, workers)
    }
    offered = {(tile.name, tile.workers) for tile in manifest.tiles}
    if planned != offered or len(offered) != len(manifest.tiles):
        wrong = sorted(f"{name} of workers {list(of)}" for name, of in planned ^ offered) or ["one of them twice"]
        raise WeightCheckError(
            f"{engine}: the rectangles that its workers are sent are not those that their loaders read, nothing was loaded: "
            f"{listed(wrong, 8)}",
            engine=engine,
        )


def whole_box(shape: Sequence[int]) -> Box:
    return box_at((0,) * len(shape), shape)


def is_in(box: Box, other: Box) -> bool:
    return len(box) == len(other) and all(a >= c and b <= d for (a, b), (c, d) in zip(box, other, strict=True))


def common_box(box: Box, other: Box) -> Box | None:
    """What both have; None where that is nothing."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return found if all(first < end for first, end in found) else None


def slices_in(box: Box, start: Sequence[int]) -> tuple[slice, ...]:
    """Where a rectangle of a tensor is in one that begins at ``start`` of the same tensor."""
    return tuple(slice(first - at, end - at) for (first, end), at in zip(box, start, strict=True))
