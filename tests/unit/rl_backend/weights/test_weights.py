"""Layout, digests, finite values and comparison of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo, UnsupportedError, WeightCheckError, WeightManifest, dtype_from_name
from rl_backend.weights.inspection import (
    BLOCK_BYTES,
    block_threads,
    copy_with_digest,
    device_checksum,
    has_non_finite,
    inspect_tensor,
    is_zero,
    same_bytes,
    tensor_digest,
)
from rl_backend.weights.staging import (
    ALIGNMENT,
    ExpectedWeights,
    check_manifest,
    check_staged,
    find_intact,
    find_mismatches,
    plan_layout,
    read_tensor,
    write_tensors,
)

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(7, 5, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "counts": torch.arange(5, dtype=torch.int32),
    }


def staged(tensors: dict[str, Tensor], version: int = 3) -> tuple[Tensor, WeightManifest]:
    layout, nbytes = plan_layout(TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    buffer = torch.full((nbytes,), 0xCD, dtype=torch.uint8)
    written = write_tensors(buffer, layout, tensors.items(), threads=2)
    return buffer, WeightManifest(version=version, tensors=written)


def test_staged_tensors_read_back_bit_for_bit_at_aligned_offsets() -> None:
    tensors = weights()
    buffer, manifest = staged(tensors)
    check_staged(buffer, manifest, engine="engine 0", threads=2)
    for info in manifest.tensors:
        assert info.offset % ALIGNMENT == 0
        assert torch.equal(read_tensor(buffer, info), tensors[info.name])
        assert read_tensor(buffer, info).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert manifest.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert WeightManifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_every_single_byte_of_a_staged_tensor_is_covered_by_its_digest() -> None:
    buffer, manifest = staged(weights())
    for info in manifest.tensors:
        for byte in range(info.offset, info.offset + info.nbytes):
            buffer[byte] ^= 1
            with pytest.raises(WeightCheckError, match=f"differ from the manifest's digests.*{info.name}"):
                check_staged(buffer, manifest, engine="engine 0")
            buffer[byte] ^= 1
    check_staged(buffer, manifest, engine="engine 0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("elements", [-1, 0, 3])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_copy_and_its_digest_cover_every_byte_around_the_ends_of_blocks(
    dtype: torch.dtype, elements: int, blocks: int
) -> None:
    tensor = (
        torch.arange(251).to(dtype).repeat(BLOCK_BYTES // 60)[: max(blocks * BLOCK_BYTES // dtype.itemsize + elements, 0)]
    )
    place = torch.zeros_like(tensor)
    digest = copy_with_digest(place, tensor)
    assert torch.equal(place, tensor)
    with block_threads(3) as pool:
        assert copy_with_digest(torch.zeros_like(tensor), tensor, pool) == tensor_digest(tensor, pool) == digest
        for threads in (None, pool):
            assert inspect_tensor(tensor, threads) == (digest, True)
            for byte in {0, BLOCK_BYTES - 1, BLOCK_BYTES, place.nbytes - 1}:
                if byte not in range(place.nbytes):
                    continue
                place.view(torch.uint8)[byte] ^= 1
                assert inspect_tensor(place, threads).digest != digest
                place.view(torch.uint8)[byte] ^= 1


def test_tensors_that_cannot_be_copied_as_bytes_are_written_as_they_read() -> None:
    turned = torch.arange(24.0).view(4, 6).t()
    for tensor in (turned, torch.ones(1).expand(7), torch._neg_view(torch.arange(3.0)), torch.arange(8.0)[::2]):
        place = torch.empty(tensor.shape)
        assert copy_with_digest(place, tensor) == tensor_digest(tensor.clone(memory_format=torch.contiguous_format))
        assert torch.equal(place, tensor)


def test_what_was_found_intact_is_not_read_again_and_anything_else_is() -> None:
    buffer, manifest = staged(weights())
    first, second = manifest.tensors[:2]
    intact = find_intact(buffer, manifest.tensors[:2])
    assert intact == {first.name: first, second.name: second}
    buffer[first.offset] ^= 1
    check_staged(buffer, manifest, engine="engine 0", intact=intact)
    for other in (second, first.replace(digest="0" * 16), first.replace(offset=512), first.replace(shape=(5, 7))):
        with pytest.raises(WeightCheckError, match=f"differ from the manifest's digests.*{first.name}"):
            check_staged(buffer, manifest, engine="engine 0", intact={first.name: other})
    assert find_intact(buffer, manifest.tensors[:2]) == {second.name: second}


def test_tensors_with_bad_values_or_outside_the_buffer_are_not_found_intact() -> None:
    buffer, manifest = staged({"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")])})
    assert list(find_intact(buffer, manifest.tensors)) == ["good"]
    with pytest.raises(WeightCheckError, match="do not lie in a staging buffer"):
        find_intact(buffer[:64], manifest.tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 1 << 20}, "do not lie in a staging buffer"),
        ({"offset": 8}, "at a multiple of 16"),
        ({"offset": 64}, "overlap"),
        ({"shape": (5, 5)}, "are not .5, 5. of float32"),
        ({"dtype": "float16"}, "are not .* of float16"),
    ],
)
def test_a_manifest_that_does_not_fit_its_buffer_is_refused(change: dict[str, object], message: str) -> None:
    buffer, manifest = staged(weights())
    tensors = list(manifest.tensors)
    tensors[0] = tensors[0].replace(**change)
    with pytest.raises(WeightCheckError, match=message):
        check_staged(buffer, manifest.replace(tensors=tuple(tensors)), engine="engine 0")


@pytest.mark.parametrize("fault", ["short", "long", "renamed", "reshaped", "recast"])
def test_an_export_that_differs_from_what_it_announced_is_refused(fault: str) -> None:
    tensors = {"a": torch.zeros(4, 2), "b": torch.zeros(3)}
    layout, nbytes = plan_layout(TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    exported = {
        "short": [("a", torch.zeros(4, 2))],
        "long": [*tensors.items(), ("c", torch.zeros(1))],
        "renamed": [("a", torch.zeros(4, 2)), ("x", torch.zeros(3))],
        "reshaped": [("a", torch.zeros(2, 4)), ("b", torch.zeros(3))],
        "recast": [("a", torch.zeros(4, 2).double()), ("b", torch.zeros(3))],
    }[fault]
    with pytest.raises(WeightCheckError, match="the export"):
        write_tensors(torch.empty(nbytes, dtype=torch.uint8), layout, exported)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1_500_000, -1])
def test_one_bad_value_among_many_is_found(dtype: torch.dtype, bad: float, place: int) -> None:
    tensor = torch.ones(3_000_000, dtype=dtype)
    assert not has_non_finite(tensor) and inspect_tensor(tensor).finite
    for value in (bad, -bad):
        tensor[place] = value
        assert has_non_finite(tensor) and not inspect_tensor(tensor).finite


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_values_whose_sum_overflows_are_accepted(dtype: torch.dtype) -> None:
    for value in (torch.finfo(dtype).max, torch.finfo(dtype).min):
        largest = torch.full((5000,), value, dtype=dtype)
        assert not has_non_finite(largest) and inspect_tensor(largest).finite


def test_infinities_that_cancel_are_found() -> None:
    tensor = torch.zeros(100)
    tensor[3], tensor[4] = float("inf"), float("-inf")
    assert has_non_finite(tensor)


def test_integers_and_empty_tensors_are_finite() -> None:
    for tensor in (torch.arange(5), torch.full((5,), -1), torch.zeros(0)):
        assert not has_non_finite(tensor) and inspect_tensor(tensor).finite


def test_tensors_with_bad_values_are_named() -> None:
    bad = torch.tensor([1.0, float("nan")])
    with pytest.raises(WeightCheckError, match="engine 1: weights hold NaN or infinity and were not loaded: b, d;") as error:
        check_staged(*staged({"a": torch.ones(2), "b": bad, "c": torch.ones(2), "d": bad}), engine="engine 1")
    assert error.value.details["names"] == ["b", "d"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_the_same_where_every_byte_is(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 7).to(dtype)
    tensor[2, 3] = torch.nan
    wider = torch.zeros(5, 9, dtype=dtype)
    wider[:, :7] = tensor
    assert same_bytes(tensor, wider[:, :7]) and same_bytes(tensor[:0], tensor[:0])
    assert not same_bytes(tensor, tensor.view(7, 5)) and not same_bytes(tensor, tensor.double())
    for place in ((0, 0), (4, 6)):
        other = tensor.clone()
        other[place] = -other[place]
        assert not same_bytes(tensor, other) and not same_bytes(other, tensor)
    assert not same_bytes(torch.zeros(2), -torch.zeros(2))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
@pytest.mark.parametrize("size", [1, 5, 640])
def test_a_tensor_is_zero_where_every_byte_is(dtype: torch.dtype, size: int) -> None:
    wide = torch.zeros(size, 3, dtype=dtype)
    for tensor in (wide, wide[:, 1], wide[:0]):
        assert is_zero(tensor)
    wide[:, 0] = 1
    assert is_zero(wide[:, 1:])
    for place in {0, size // 2, size - 1}:
        wide[place, 1] = 1
        assert not is_zero(wide[:, 1:]) and not is_zero(wide[:, 1].clone()) and not is_zero(wide[:, 1])
        wide[place, 1] = 0
    full = torch.full((size,), 7, dtype=dtype)
    assert not is_zero(full), "equal bytes that are not 0"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64])
def test_a_checksum_changes_with_any_byte_and_a_digest_with_any_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 1001).to(dtype)
    checksum, digest = device_checksum(tensor), tensor_digest(tensor)
    assert device_checksum(tensor.clone()) == checksum
    bytes_of = tensor.view(torch.uint8)
    bytes_of[17] ^= 4
    assert device_checksum(tensor) != checksum
    bytes_of[17] ^= 4
    assert tensor_digest(tensor) == digest
    assert tensor_digest(tensor.flip(0)) != digest


def expected() -> ExpectedWeights:
    names = ["q", "k", "v", "norm"]
    required = {name: TensorInfo(name=name, shape=(2, 2), dtype="float32", nbytes=16) for name in names}
    optional = {"head": TensorInfo(name="head", shape=(3,), dtype="float32", nbytes=12)}
    return ExpectedWeights(required, optional, fused_groups=(("q", "k", "v"),))


def test_weights_with_and_without_optional_ones_match() -> None:
    required = list(expected().required.values())
    assert find_mismatches(required, expected()) == []
    assert find_mismatches([*required, expected().optional["head"]], expected()) == []


def test_every_mismatch_is_reported_by_name_at_once() -> None:
    offered = (
        TensorInfo(name="q", shape=(2, 3), dtype="float32", nbytes=24),
        TensorInfo(name="k", shape=(2, 2), dtype="bfloat16", nbytes=8),
        TensorInfo(name="stranger", shape=(1,), dtype="float32", nbytes=4),
    )
    with pytest.raises(WeightCheckError) as error:
        check_manifest(WeightManifest(version=4, tensors=offered), expected(), engine="engine 2")
    assert str(error.value) == (
        "engine 2 refuses weights of version 4, nothing was loaded: half of a fused group: q, k came without v; "
        "missing: norm; unknown to the engine: stranger; wrong shape: q is (2, 3), the engine has (2, 2); "
        "wrong dtype: k is bfloat16, the engine takes float32"
    )


def test_one_part_of_a_fused_group_is_named_as_such() -> None:
    offered = (expected().required["k"], expected().required["norm"])
    assert "half of a fused group: k came without q, v" in "; ".join(find_mismatches(offered, expected()))


def test_a_dtype_that_torch_does_not_have_is_refused() -> None:
    assert dtype_from_name("bfloat16") is torch.bfloat16
    for name in ("bfloat17", "Tensor", ""):
        with pytest.raises(UnsupportedError, match="not a torch dtype"):
            dtype_from_name(name)


def test_memory_of_what_a_digest_was_taken_of_can_be_released() -> None:
    tensor = torch.arange(12.0)
    assert tensor_digest(tensor[2:5]) == tensor_digest(tensor[2:5].clone())
    assert tensor_digest(torch.empty(0)) != tensor_digest(tensor)
    assert tensor.untyped_storage().resizable()
