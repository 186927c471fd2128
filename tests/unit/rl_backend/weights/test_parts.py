"""Rectangles of random layouts: planned, written by each rank into one buffer, and checked as an engine checks them."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import PackedWeight, TensorInfo, TensorPart, WeightCheckError, WeightManifest, stored_tensors
from rl_backend.parallel.shards import ShardLayout
from rl_backend.runtime.native.export import shard_infos
from rl_backend.runtime.native.layout import TensorLayout
from rl_backend.weights import inspection
from rl_backend.weights.inspection import block_threads, copy_with_digest, inspect_tensor, tensor_digest
from rl_backend.weights.staging import check_staged, find_intact, plan_layout, read_tensor, require_covered, write_tensors

# Cuts of a dense tensor over (fsdp, tp), tensor parallelism first; and of experts (E, 2, N, K) over (edp, ep, etp).
DENSE = [((1, 0), (0, 0)), ((1, 1), (0, 0)), ((0, 0),), ((0, 1),), ((1, 0), (0, 1)), ((1, 0),), ()]
EXPERTS = [((1, 0), (2, 2), (0, 0)), ((1, 0), (2, 3), (0, 2)), ((1, 0), (0, 0)), ((1, 0),)]


class Model(NamedTuple):
    """A model over ranks: Hugging Face tensors, the rectangle that each rank has of them, and what ranks send."""

    full: dict[str, Tensor]
    held: dict[str, dict[int, tuple[slice, ...]]]
    infos: tuple[TensorInfo, ...]
    parts: tuple[TensorPart, ...]
    ranks: int


def random_model(seed: int) -> Model:
    """Sizes that ranks do not divide, fewer rows than ranks, padded vocabularies, experts and pipeline stages."""
    draw = random.Random(seed)
    pp, dp, tp = draw.choice([(1, 2, 2), (2, 1, 2), (1, 3, 2), (2, 2, 2), (1, 1, 4), (1, 4, 1), (3, 2, 1)])
    ep = draw.choice([size for size in (1, 2, 3, 4) if dp * tp % size == 0])
    etp = draw.choice([size for size in (1, 2) if dp * tp // ep % size == 0])
    names: dict[str, Any] = {}
    layouts: dict[str, TensorLayout] = {}
    for stage in range(pp):
        ranks = tuple(range(stage * dp * tp, (stage + 1) * dp * tp))
        shapes = [(draw.choice([129, 130, 7]), 6), (9, 5), (3, 8), (1, 4), (11,), (2,), (4, 1, 3)]
        for number, shape in enumerate(shapes):
            cuts = draw.choice([cut for cut in DENSE if all(dim < len(shape) for _, dim in cut)])
            names[f"{stage}.{number}"] = f"layers.{stage}.{number}.weight"
            layouts[f"{stage}.{number}"] = TensorLayout(ShardLayout(shape, (dp, tp), ranks, cuts), torch.float32)
        packed = (ep * 2, 2)
        stored = tuple(f"layers.{stage}.experts.{expert}.{kind}" for expert in range(packed[0]) for kind in ("gate", "up"))
        names[f"{stage}.experts"] = PackedWeight(packed, stored)
        mesh = (dp * tp // ep // etp, ep, etp)
        experts = ShardLayout((*packed, 5, 7), mesh, ranks, draw.choice(EXPERTS))
        layouts[f"{stage}.experts"] = TensorLayout(experts, torch.float32)
    full, of_name = {}, {}
    for key, name in names.items():
        shape, packed = layouts[key].shards.shape, len(names[key].shape) if isinstance(names[key], PackedWeight) else 0
        for index, stored_name in stored_tensors(name):
            full[stored_name] = torch.randn(shape[packed:], generator=torch.Generator().manual_seed(len(full)))
            of_name[stored_name] = layouts[key].shards, index
    handle: Any = SimpleNamespace(weight_names=names, layouts=layouts)
    infos = tuple(TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in full.items())
    held = {name: holders(layout, index) for name, (layout, index) in of_name.items()}
    return Model(full, held, infos, shard_infos(handle, None), pp * dp * tp)


def holders(layout: ShardLayout, index: tuple[int, ...]) -> dict[int, tuple[slice, ...]]:
    """Rank -> the rectangle that it has of the tensor at ``index``."""
    regions = {rank: layout.region(rank) for rank in layout.ranks}
    return {
        rank: region[len(index) :]
        for rank, region in regions.items()
        if all(edge.start <= place < edge.stop for edge, place in zip(region, index, strict=False))
    }


def staged(model: Model) -> tuple[Tensor, WeightManifest]:
    """What the ranks write, one after the other, where other bytes were."""
    layout, nbytes = plan_layout(model.infos)
    offsets = {info.name: info.offset for info in layout}
    buffer = torch.full((nbytes,), 0xCD, dtype=torch.uint8)
    parts: list[TensorPart] = []
    for rank in range(model.ranks):
        mine = [part.replace(offset=offsets[part.name]) for part in model.parts if part.rank == rank]
        weights = ((str(part), model.full[part.name][part.region].clone()) for part in mine)
        parts += write_tensors(buffer, mine, weights, threads=2)
    return buffer, WeightManifest(version=1, tensors=layout, parts=tuple(parts))


@pytest.mark.parametrize("seed", range(40))
def test_ranks_of_any_layout_send_every_element_once(seed: int) -> None:
    model = random_model(seed)
    require_covered(model.infos, model.parts)
    counts = {name: torch.zeros_like(tensor) for name, tensor in model.full.items()}
    for part in model.parts:
        counts[part.name][part.region] += 1
        assert model.held[part.name][part.rank] == part.region, "a rank sends what it has"
        assert part.nbytes == 4 * math.prod(part.shape) > 0
    assert all(bool((count == 1).all()) for count in counts.values())
    for wrong in (model.parts[1:], (*model.parts, model.parts[seed % len(model.parts)])):
        with pytest.raises(WeightCheckError, match="every element once"):
            require_covered(model.infos, wrong)


@pytest.mark.parametrize("seed", range(0, 40, 8))
def test_what_ranks_write_is_every_tensor_and_each_byte_is_checked(seed: int) -> None:
    model = random_model(seed)
    buffer, manifest = staged(model)
    check_staged(buffer, manifest, engine="engine 0", threads=2)
    for info in manifest.tensors:
        assert torch.equal(read_tensor(buffer, info), model.full[info.name])
    assert WeightManifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert manifest.nbytes == sum(tensor.nbytes for tensor in model.full.values())
    intact = find_intact(buffer, manifest.parts)
    assert intact == {str(part): part for part in manifest.parts}
    draw = random.Random(seed)
    for part in draw.sample(manifest.parts, 8):
        place = read_tensor(buffer, part).view(torch.int32)
        spot = tuple(draw.randrange(size) for size in part.shape)
        place[spot] ^= 1
        # What was found intact before is not read again.
        check_staged(buffer, manifest, engine="engine 0", intact=intact)
        with pytest.raises(WeightCheckError, match="staged bytes differ") as torn:
            check_staged(buffer, manifest, engine="engine 0")
        assert torn.value.details["names"] == [str(part)]
        place[spot] ^= 1
    for wrong in (manifest.parts[1:], (*manifest.parts, manifest.parts[0])):
        with pytest.raises(WeightCheckError, match=f"^{manifest.parts[0].name}: .*every element once"):
            check_staged(buffer, manifest.replace(parts=wrong), engine="engine 0")


def cut(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> TensorPart:
    return TensorPart.of("w", size, torch.float32, whole=shape, start=start, rank=1)


def test_a_rectangle_that_is_written_elsewhere_than_it_says_is_noticed() -> None:
    left, right = cut((4, 6), (0, 0), (4, 3)), cut((4, 6), (0, 3), (4, 3))
    full = torch.arange(24.0).view(4, 6)
    layout, nbytes = plan_layout([TensorInfo.of("w", (4, 6), torch.float32)])
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    first = write_tensors(buffer, [left], [(str(left), full[:, :3])])
    wrong = write_tensors(buffer, [left], [(str(left), full[:, 3:])])
    parts = (*first, right.replace(digest=wrong[0].digest))
    with pytest.raises(WeightCheckError, match=r"staged bytes differ.*w\[0:4, 0:3\], w\[0:4, 3:6\]"):
        check_staged(buffer, WeightManifest(version=1, tensors=layout, parts=parts), engine="engine 0")


def test_bad_values_and_places_of_rectangles_are_named() -> None:
    halves = [cut((4, 6), (0, 0), (4, 3)), cut((4, 6), (0, 3), (4, 3))]
    layout, nbytes = plan_layout([TensorInfo.of("w", (4, 6), torch.float32)])
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    bad = torch.ones(4, 3)
    bad[2, 1] = math.inf
    parts = write_tensors(buffer, halves, [(str(halves[0]), torch.ones(4, 3)), (str(halves[1]), bad)])
    with pytest.raises(WeightCheckError, match=r"NaN or infinity and were not loaded: w\[0:4, 3:6\];"):
        check_staged(buffer, WeightManifest(version=1, tensors=layout, parts=parts), engine="engine 0")
    assert list(find_intact(buffer, parts)) == ["w[0:4, 0:3]"]
    with pytest.raises(WeightCheckError, match="do not lie in a staging buffer of 64 bytes"):
        find_intact(buffer[:64], parts[:1])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_digest_by_rows_covers_every_byte_of_a_strided_tensor(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(inspection, "BLOCK_BYTES", rows * 3 * 4)
    whole = torch.zeros(7, 5)
    tensor, place = torch.randn(7, 3), whole[:, 1:4]
    with block_threads(3) as pool:
        for threads in (None, pool):
            place.zero_()
            digest = copy_with_digest(place, tensor, threads, by_rows=True)
            assert digest == tensor_digest(tensor, threads, by_rows=True) == tensor_digest(place, threads, by_rows=True)
            assert inspect_tensor(place, threads, by_rows=True) == (digest, True)
            assert torch.equal(place, tensor) and not whole[:, [0, 4]].any()
            for row, column in itertools.product(range(7), range(3)):
                place.view(torch.int32)[row, column] ^= 1
                assert tensor_digest(place, threads, by_rows=True) != digest
                place.view(torch.int32)[row, column] ^= 1


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_bad_value_in_any_run_of_rows_is_found(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(inspection, "BLOCK_BYTES", rows * 3 * 4)
    # What lies between the rows is no part of the tensor.
    whole = torch.full((7, 5), math.inf)
    place = whole[:, 1:4].zero_()
    with block_threads(3) as pool:
        for threads in (None, pool):
            assert inspect_tensor(place, threads, by_rows=True).finite
            for row in range(7):
                place[row, 2] = math.nan
                assert not inspect_tensor(place, threads, by_rows=True).finite
                place[row, 2] = 0.0


@pytest.mark.parametrize("change", [{"dtype": "int32"}, {"offset": 64}, {"whole": (4, 7)}], ids=str)
def test_rectangles_cover_a_tensor_in_its_own_dtype_shape_and_place(change: dict[str, Any]) -> None:
    info = TensorInfo.of("w", (4, 6), torch.float32)
    halves = [cut((4, 6), (0, 0), (4, 3)), cut((4, 6), (0, 3), (4, 3))]
    require_covered([info, TensorInfo.of("none", (0, 3), torch.float32)], halves)
    for number in range(2):
        wrong = [half.replace(**change) if place == number else half for place, half in enumerate(halves)]
        with pytest.raises(WeightCheckError, match=r"^w: .*every element once"):
            require_covered([info], wrong)
    with pytest.raises(WeightCheckError, match=r"^rectangles of tensors that are not pushed: w$"):
        require_covered([], halves)
