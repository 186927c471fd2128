"""Tiles of random layouts on both sides: what workers read once, what ranks hold cut to it, and what is noticed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from rl_backend.contracts import TensorInfo, TensorPart, WeightCheckError, WeightManifest
from rl_backend.contracts.weights import Box
from rl_backend.weights.staging import check_staged, plan_layout, read_tensor, require_covered, write_tensors
from rl_backend.weights.tiles import Reads, TileMap, common_box, is_in, plan_tiles, require_tiles, slices_in
from tests.unit.rl_backend.weights.test_parts import Model, random_model


def random_reads(draw: random.Random, infos: Sequence[TensorInfo], workers: int) -> list[Reads]:
    """Rows, columns, one worker's alone, all of everyone, sections of a fused tensor, overlapping rows, and nothing."""
    reads: list[dict[str, list[Box]]] = [{} for _ in range(workers)]
    for info in infos:
        kind, whole = draw.choice(["cut", "cut", "one", "all", "fused", "overlap", "none"]), [(0, n) for n in info.shape]
        dim = draw.randrange(len(info.shape))
        edges = [info.shape[dim] * worker // workers for worker in range(workers + 1)]
        chosen = draw.randrange(workers)
        for worker in range(workers):
            boxes: list[Box] = []
            if kind == "all" or (kind == "one" and worker == chosen):
                boxes = [tuple(whole)]
            elif kind in ("cut", "fused", "overlap"):
                spans = [(edges[worker], min(edges[worker + 1] + (kind == "overlap"), info.shape[dim]))]
                if kind == "fused":
                    middle = (spans[0][0] + spans[0][1]) // 2
                    spans = [(spans[0][0], middle), (middle, spans[0][1])]
                boxes = [(*whole[:dim], span, *whole[dim + 1 :]) for span in spans if span[0] < span[1]]  # type: ignore[assignment]
            reads[worker][info.name] = boxes
    return list(reads)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*edges) for edges in box)


def staged(model: Model, reads: Sequence[Reads]) -> tuple[torch.Tensor, WeightManifest]:
    """What ranks write of what workers read, each its own rectangles."""
    tiles, nbytes = plan_layout(plan_tiles(model.infos, reads))
    buffer = torch.full((nbytes,), 0xCD, dtype=torch.uint8)
    written: list[TensorPart] = []
    for rank in range(model.ranks):
        of_rank = [part for part in model.parts if part.rank == rank]
        pieces = [(part, *found) for part in of_rank for found in TileMap(tiles).pieces(part.name, part.start, part.shape)]
        mine = list(TileMap(tiles).cut_parts(of_rank))
        weights = (
            (str(piece), model.full[part.name][region(box)].clone())
            for piece, (part, _, box) in zip(mine, pieces, strict=True)
        )
        written += write_tensors(buffer, mine, weights)
    return buffer, WeightManifest(version=1, tensors=model.infos, tiles=tiles, parts=tuple(written))


@pytest.mark.parametrize("seed", range(25))
def test_each_worker_gets_what_it_reads_and_nothing_is_sent_twice(seed: int) -> None:
    model, draw = random_model(seed), random.Random(seed)
    workers = draw.choice([2, 3, 4])
    reads = random_reads(draw, model.infos, workers)
    buffer, manifest = staged(model, reads)
    require_tiles(manifest, reads, engine="engine 0")
    check_staged(buffer, manifest, engine="engine 0")
    for info in model.infos:
        of_all = torch.zeros(info.shape, dtype=torch.int32)
        for worker, own in enumerate(reads):
            got, wanted = torch.zeros(info.shape, dtype=torch.int32), torch.zeros(info.shape, dtype=torch.int32)
            for box in own[info.name]:
                wanted[region(box)] = 1
            for tile in manifest.tiles:
                if tile.tensor == info.name and worker in tile.workers:
                    got[region(tile.box)] += 1
                    assert torch.equal(read_tensor(buffer, tile), model.full[info.name][region(tile.box)])
            assert torch.equal(got, wanted)
            of_all |= wanted
        assert of_all.sum() * 4 == sum(tile.nbytes for tile in manifest.tiles if tile.tensor == info.name), (
            "each element once"
        )
    assert WeightManifest.model_validate_json(manifest.model_dump_json()) == manifest


@pytest.mark.shows(
    "sync: of what engines' workers are sent, a rectangle twice, missing, elsewhere or a stale element is noticed"
)
@pytest.mark.parametrize("seed", [0, 3, 5])
def test_what_is_wrong_with_rectangles_of_tiles_is_noticed(seed: int) -> None:
    model = random_model(seed)
    reads = random_reads(random.Random(seed), model.infos, 2)
    buffer, manifest = staged(model, reads)
    parts = manifest.parts
    moved = next(part for part in parts if part.start[0] + part.shape[0] < part.whole[0])
    elsewhere = moved.replace(start=(moved.start[0] + 1, *moved.start[1:]))
    for wrong in ((*parts, parts[0]), parts[1:], tuple(elsewhere if part is moved else part for part in parts)):
        with pytest.raises(WeightCheckError, match="every element once"):
            check_staged(buffer, manifest.replace(parts=wrong), engine="engine 0")
    stale = read_tensor(buffer, parts[2]).view(torch.int32)
    stale[(0,) * stale.dim()] ^= 1
    with pytest.raises(WeightCheckError, match="staged bytes differ") as noticed:
        check_staged(buffer, manifest, engine="engine 0")
    assert noticed.value.details["names"] == [str(parts[2])]


def test_tiles_that_are_not_what_workers_read_are_refused() -> None:
    infos = [TensorInfo.of("w", (4, 6), torch.float32), TensorInfo.of("b", (4,), torch.float32)]
    reads: list[Reads] = [{"w": [((0, 2), (0, 6))], "b": [((0, 4),)]}, {"w": [((2, 4), (0, 6))], "b": [((0, 4),)]}]
    tiles = plan_tiles(infos, reads)
    assert [(str(tile), tile.workers) for tile in tiles] == [
        ("w[0:2, 0:6]", (0,)),
        ("w[2:4, 0:6]", (1,)),
        ("b[0:4]", (0, 1)),
    ]
    manifest = WeightManifest(version=1, tensors=tuple(infos), tiles=tiles)
    require_tiles(manifest, reads, engine="engine 0")
    other = [tile.replace(workers=(1,)) if tile.workers == (0,) else tile for tile in tiles]
    for wrong in (tiles[1:], (*tiles, tiles[0]), tuple(other), ()):
        with pytest.raises(WeightCheckError, match="engine 0: the rectangles that its workers are sent are not those"):
            require_tiles(manifest.replace(tiles=tuple(wrong)), reads, engine="engine 0")
    with pytest.raises(WeightCheckError, match="every element once"):
        require_covered(tiles, [TensorPart.of("w[0:2, 0:6]", (2, 6), torch.float32, whole=(2, 6), start=(0, 0), rank=0)])


def test_a_tensor_of_another_shape_than_was_read_is_sent_whole_for_the_engine_to_refuse() -> None:
    reads: list[Reads] = [{"w": [((0, 2), (0, 6))]}, {"w": [((2, 4), (0, 6))]}]
    (tile,) = plan_tiles([TensorInfo.of("w", (3, 6), torch.float32)], reads)
    assert (tile.shape, tile.workers) == ((3, 6), (0, 1))
    (tile,) = plan_tiles([TensorInfo.of("w", (24,), torch.float32)], reads)
    assert (tile.shape, tile.workers) == ((24,), (0, 1))
    assert not plan_tiles([TensorInfo.of("new", (3, 6), torch.float32)], reads)


def test_rectangles_that_only_touch_have_nothing_in_common() -> None:
    box: Box = ((2, 6), (0, 4))
    assert common_box(box, ((0, 4), (3, 9))) == common_box(((0, 4), (3, 9)), box) == ((2, 4), (3, 4))
    assert common_box((), ()) == ()
    for other in (((6, 8), (0, 4)), ((0, 2), (0, 4)), ((2, 6), (4, 5)), ((3, 3), (0, 4))):
        assert common_box(box, other) is None and common_box(other, box) is None
    tiles = plan_tiles([TensorInfo.of("w", (8, 4), torch.float32)], [{"w": [((0, 4), (0, 4))]}, {"w": [((4, 8), (0, 4))]}])
    assert [box for _, box in TileMap(tiles).pieces("w", (4, 1), (2, 3))] == [((4, 6), (1, 4))]


def test_a_rectangle_is_in_one_of_as_many_dimensions_that_ends_no_earlier() -> None:
    box: Box = ((2, 6), (0, 4))
    assert is_in(box, box) and is_in(((3, 6), (0, 1)), box) and is_in((), ())
    for other in (((1, 6), (0, 4)), ((2, 7), (0, 4)), ((2, 6), (0, 5)), ((2, 6),)):
        assert not is_in(other, box)
    assert not is_in(((2, 6), (0, 4), (0, 1)), box)
    assert slices_in(((3, 6), (1, 4)), (2, 1)) == (slice(1, 4), slice(0, 3))


def test_a_tensor_of_one_number_is_a_tile_of_those_who_read_it() -> None:
    reads: list[Reads] = [{}, {"scale": [()]}, {"scale": [()]}]
    (tile,) = plan_tiles([TensorInfo.of("scale", (), torch.float32)], reads)
    assert (tile.shape, tile.nbytes, tile.workers) == ((), 4, (1, 2))
