"""Weights by their Hugging Face names, types by theirs, and descriptions of tensors."""

from __future__ import annotations

import pytest
import torch

from rl_backend.contracts import (
    ConfigError,
    CopiedWeight,
    PackedWeight,
    TensorInfo,
    UnsupportedError,
    WeightManifest,
    dtype_from_name,
    export_dtype,
    name_of_dtype,
    stored_names,
    stored_tensors,
)

PACKED = PackedWeight((2, 3), ("a0", "b0", "c0", "a1", "b1", "c1"))
COPIED = CopiedWeight("embed", ("first", "second"))


def test_each_stored_tensor_has_its_place_in_the_parameter() -> None:
    assert list(stored_tensors("norm")) == [((), "norm")]
    assert list(stored_tensors(COPIED)) == [((), "embed"), ((), "first"), ((), "second")]
    assert list(stored_tensors(PACKED)) == [
        ((0, 0), "a0"), ((0, 1), "b0"), ((0, 2), "c0"), ((1, 0), "a1"), ((1, 1), "b1"), ((1, 2), "c1"),
    ]  # fmt: skip
    assert stored_names({"x": "norm", "y": PACKED, "z": COPIED}) == ["norm", *PACKED.names, "embed", "first", "second"]


@pytest.mark.parametrize("names", [("a",) * 5, ("a",) * 7, ()])
def test_a_packed_weight_needs_a_name_for_each_place(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is (shorter|longer) than argument 1"):
        stored_names({"x": PackedWeight((2, 3), names)})


def test_types_and_their_names() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        assert dtype_from_name(name_of_dtype(dtype)) == dtype and "torch" not in name_of_dtype(dtype)
    for name in ("float33", "Tensor", "cuda"):
        with pytest.raises(UnsupportedError, match=f"dtype {name!r} is not a torch dtype; expected a name such as"):
            dtype_from_name(name)


@pytest.mark.parametrize(
    ("dtype", "in_float32", "found"),
    [
        (torch.bfloat16, False, torch.bfloat16),
        (torch.bfloat16, True, torch.float32),
        (torch.float32, False, torch.float32),
        (torch.float64, True, torch.float64),
    ],
)
def test_a_weight_that_is_computed_with_in_float32_is_exported_so(
    dtype: torch.dtype, in_float32: bool, found: torch.dtype
) -> None:
    assert export_dtype(dtype, in_float32=in_float32) == found


def test_a_tensor_is_described_by_its_bytes() -> None:
    info = TensorInfo.of("w", [3, 5], torch.bfloat16)
    assert (info.name, info.shape, info.dtype, info.nbytes, info.num_elements) == ("w", (3, 5), "bfloat16", 30, 15)
    assert (info.offset, info.digest, str(info)) == (0, "", "w")
    assert TensorInfo.of("s", (), torch.float64).nbytes == 8
    other = TensorInfo.of("v", (7,), torch.float32)
    assert WeightManifest(version=0, tensors=(info, other)).nbytes == 58
    with pytest.raises(ConfigError, match=r"tensors=\['v', 'w'\]: each name may be sent once"):
        WeightManifest(version=0, tensors=(info, other, other, info, TensorInfo.of("x", (1,), torch.int8)))
