"""Staging buffers: where tensors lie, what is told of them, and what is wrong with a buffer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo, WeightCheckError, WeightManifest
from rl_backend.weights.inspection import tensor_digest
from rl_backend.weights.staging import check_staged, find_intact, plan_layout, read_tensor, write_tensors

TENSORS = {
    "a": torch.arange(17.0),
    "none": torch.zeros(0, 3),
    "b": torch.arange(16, dtype=torch.int32).view(2, 8),
    "c": torch.tensor([1.5, 2.5]).bfloat16(),
    "d": torch.tensor(4.0, dtype=torch.float64),
}


def layout_of(tensors: dict[str, Tensor]) -> tuple[tuple[TensorInfo, ...], int]:
    return plan_layout(TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())


def staged(tensors: dict[str, Tensor]) -> tuple[Tensor, WeightManifest]:
    layout, size = layout_of(tensors)
    buffer = torch.full((size,), 0xCD, dtype=torch.uint8)
    return buffer, WeightManifest(version=5, tensors=write_tensors(buffer, layout, tensors.items()))


def test_tensors_lie_behind_each_other_at_whole_cache_lines() -> None:
    layout, size = layout_of(TENSORS)
    assert [(tensor.name, tensor.offset) for tensor in layout] == [
        ("a", 0),
        ("none", 128),
        ("b", 128),
        ("c", 192),
        ("d", 256),
    ]
    assert size == 320
    assert plan_layout([]) == ((), 64)
    assert layout_of({"none": torch.zeros(0)})[1] == 64


@pytest.mark.parametrize("threads", [1, 3])
def test_each_tensor_is_told_of_once_it_is_in_its_place(threads: int) -> None:
    layout, size = layout_of(TENSORS)
    buffer, told = torch.zeros(size, dtype=torch.uint8), list[TensorInfo]()

    def note(info: TensorInfo) -> None:
        assert torch.equal(read_tensor(buffer, info), TENSORS[info.name])
        told.append(info)

    def reused() -> Iterator[tuple[str, Tensor]]:
        """A tensor is overwritten once the next one is taken."""
        for name, tensor in TENSORS.items():
            lent = tensor.clone()
            yield name, lent
            lent.zero_()

    manifest = WeightManifest(version=5, tensors=write_tensors(buffer, layout, reused(), threads=threads, staged=note))
    assert manifest.tensors == tuple(told)
    assert [info.digest for info in told] == [tensor_digest(tensor) for tensor in TENSORS.values()]
    assert [info.offset for info in told] == [info.offset for info in layout]
    check_staged(buffer, manifest, engine="engine 0", threads=threads)


def test_an_export_is_closed_when_what_is_told_fails() -> None:
    layout, size = layout_of(TENSORS)
    closed = []

    def export() -> Iterator[tuple[str, Tensor]]:
        try:
            yield from TENSORS.items()
        finally:
            closed.append(True)

    def fail(_: TensorInfo) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write_tensors(torch.zeros(size, dtype=torch.uint8), layout, export(), staged=fail)
    assert closed == [True]


@pytest.mark.parametrize("threads", [1, 3])
def test_changed_bytes_are_found_before_bad_values_and_every_tensor_is_named(threads: int) -> None:
    tensors = {f"t{place}": torch.full((3,), float("nan")) for place in range(10)}
    buffer, manifest = staged(tensors)
    with pytest.raises(
        WeightCheckError, match="engine 1: weights hold NaN or infinity and were not loaded: t0, t1, "
    ) as bad:
        check_staged(buffer, manifest, engine="engine 1", threads=threads)
    assert bad.value.details == {"engine": "engine 1", "names": list(tensors)}
    assert "t8" not in str(bad.value), "a long list is cut"
    for info in manifest.tensors[1:]:
        buffer[info.offset] ^= 1
    with pytest.raises(WeightCheckError, match="engine 2: staged bytes differ from the manifest's digests") as torn:
        check_staged(buffer, manifest, engine="engine 2", threads=threads)
    assert torn.value.details == {"engine": "engine 2", "names": list(tensors)[1:]}
    assert "nothing was loaded: t1, t2, t3, t4, t5, t6, t7, t8;" in str(torn.value)


def test_what_lies_between_tensors_does_not_count() -> None:
    buffer, manifest = staged(TENSORS)
    buffer[68:128] = 0
    buffer[196:256] = 0xFF
    check_staged(buffer, manifest, engine="engine 0")
    assert find_intact(buffer, manifest.tensors, threads=2) == {info.name: info for info in manifest.tensors}
    assert find_intact(buffer, []) == {}


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        (4, {"offset": 64}, "tensors of the manifest overlap in the staging buffer"),
        (2, {"offset": 192}, "overlap"),
        (0, {"offset": 272}, r"a: 68 bytes at offset 272 are not .* or do not lie in a staging buffer of 320 bytes"),
        (4, {"offset": 313}, r"d: 8 bytes at offset 313 .* do not lie"),
        (4, {"offset": 320}, r"d: 8 bytes at offset 320 .* do not lie"),
        (3, {"nbytes": 8}, r"c: 8 bytes at offset \d+ are not \(2,\) of bfloat16"),
    ],
)
def test_places_that_cannot_be_are_refused(place: int, changes: dict[str, int], message: str) -> None:
    buffer, manifest = staged(TENSORS)
    tensors = list(manifest.tensors)
    tensors[place] = tensors[place].replace(**changes)
    with pytest.raises(WeightCheckError, match=message):
        check_staged(buffer, manifest.replace(tensors=tuple(tensors)), engine="engine 0")
    with pytest.raises(WeightCheckError, match=message):
        find_intact(buffer, tensors)


def test_neighbours_without_a_gap_do_not_overlap_and_empty_tensors_may_lie_anywhere() -> None:
    tensors = [TensorInfo.of(name, (4,), torch.float32).replace(offset=16 * place) for place, name in enumerate("cab")]
    empty = TensorInfo.of("none", (0,), torch.float32).replace(offset=16)
    buffer = torch.zeros(48, dtype=torch.uint8)
    digest = tensor_digest(torch.zeros(4))
    found = find_intact(buffer, [*(each.replace(digest=digest) for each in reversed(tensors)), empty])
    assert list(found) == ["b", "a", "c"], "an empty tensor without its digest is not intact"
