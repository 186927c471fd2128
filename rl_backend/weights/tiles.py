"""Tiles: the rectangles of a tensor that an engine's workers read, each with a place of its own in a staging buffer."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rl_backend.contracts import TensorInfo, TensorPart, TensorTile, WeightCheckError, WeightManifest
from rl_backend.contracts.errors import listed

type Box = tuple[tuple[int, int], ...]
"""A rectangle of a tensor: the first element and the one after the last, along each dimension."""

type Reads = Mapping[str, Sequence[Box]]
"""What a worker's loaders read of each tensor, by name; nothing of a tensor that it has no part of."""


def plan_tiles(infos: Sequence[TensorInfo], workers: Sequence[Reads]) -> tuple[TensorTile, ...]:
    """What workers read of tensors, every element once: a tensor is cut where what one of them reads begins or ends.

    What nobody reads is in no tile. Of another shape than the one that was read a tensor is one tile, of all workers: the
    engine refuses it, and says why.
    """
    return tuple(tile for info in infos for tile in _tiles_of(info, [reads.get(info.name, ()) for reads in workers]))


def _tiles_of(info: TensorInfo, boxes: Sequence[Sequence[Box]]) -> Iterator[TensorTile]:
    every = {box for of_worker in boxes for box in of_worker}
    if not every:
        return
    if not all(_is_in(box, _whole(info.shape)) for box in every):
        every = {_whole(info.shape)}
        boxes = [tuple(every)] * len(boxes)
    edges = [sorted({edge for box in every for edge in box[dim]}) for dim in range(len(info.shape))]
    for cell in itertools.product(*map(itertools.pairwise, edges)):
        if readers := tuple(worker for worker, own in enumerate(boxes) if any(_is_in(cell, box) for box in own)):
            yield TensorTile.cut(info, cell, readers)


class TileMap:
    """Tiles by the tensor that they are of."""

    def __init__(self, tiles: Sequence[TensorTile]) -> None:
        self._tiles: dict[str, list[TensorTile]] = defaultdict(list)
        for tile in tiles:
            self._tiles[tile.tensor].append(tile)

    def pieces(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[TensorTile, Box]]:
        """The tiles that a rectangle of the tensor ``name`` has elements of, and the rectangle in the tensor of these."""
        for tile in self._tiles.get(name, ()):
            own = zip(start, shape, tile.start, tile.shape, strict=True)
            box = tuple((max(one, other), min(one + size, other + extent)) for one, size, other, extent in own)
            if all(first < end for first, end in box):
                yield tile, box

    def cut_parts(self, parts: Sequence[TensorPart]) -> Iterator[TensorPart]:
        """Rectangles of tensors as rectangles of tiles, in their order."""
        for part in parts:
            for tile, box in self.pieces(part.name, part.start, part.shape):
                yield tile.part(box, part.rank)


def require_tiles(manifest: WeightManifest, workers: Sequence[Reads], *, engine: str) -> None:
    """Proves that each worker gets what it reads; raises :class:`WeightCheckError` naming tiles that differ."""
    planned = {(tile.name, tile.workers) for tile in plan_tiles(manifest.tensors, workers)}
    offered = {(tile.name, tile.workers) for tile in manifest.tiles}
    if planned != offered or len(offered) != len(manifest.tiles):
        wrong = sorted(f"{name} of workers {list(of)}" for name, of in planned ^ offered) or ["one of them twice"]
        raise WeightCheckError(
            f"{engine}: the rectangles that its workers are sent are not those that their loaders read, nothing was loaded: "
            f"{listed(wrong, 8)}",
            engine=engine,
        )


def _is_in(box: Box, other: Box) -> bool:
    return len(box) == len(other) and all(a >= c and b <= d for (a, b), (c, d) in zip(box, other, strict=True))


def _whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)
