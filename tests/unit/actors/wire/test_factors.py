"""Factors of adapters as one run of bytes."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.wire import segment
from actors.wire.factors import FactorMemories, FactorMemory, PackedFactors, SharedFactors, factor_digest
from actors.wire.segment import Segment, SharedSegment
from rl_backend.contracts import WeightSyncError

A, B = torch.arange(6.0).view(2, 3) + 1, torch.tensor([[0.5], [-2.0]])
SHAPES = {"b.lora_B": (2, 1), "a.lora_A": (2, 3)}


def packed(dtype: str = "float32", memory: FactorMemory | None = None) -> PackedFactors:
    return PackedFactors.pack(SHAPES, [("b.lora_B", B, 4.0), ("a.lora_A", A, 1.0)], dtype, memory)


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 32), ("bfloat16", 16)])
def test_factors_lie_in_the_order_of_their_names_each_times_its_scale(dtype: str, nbytes: int) -> None:
    found = packed(dtype)
    assert (list(found.shapes.items()), found.dtype) == ([("a.lora_A", (2, 3)), ("b.lora_B", (2, 1))], dtype)
    assert found.values.dtype == np.uint8 and found.values.shape == (nbytes,)
    tensors = found.tensors()
    assert list(tensors) == ["a.lora_A", "b.lora_B"] and {value.dtype for value in tensors.values()} == {
        getattr(torch, dtype)
    }
    assert torch.equal(tensors["a.lora_A"].float(), A) and tensors["b.lora_B"].tolist() == [[2.0], [-8.0]]
    flat = torch.from_numpy(found.values).view(getattr(torch, dtype)).tolist()
    assert flat == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 2.0, -8.0]
    assert B.tolist() == [[0.5], [-2.0]]
    same = PackedFactors.of({"b.lora_B": (B * 4, 1.0), "a.lora_A": (A / 2, 2.0)}, dtype)
    assert same.digest == found.digest == factor_digest(tensors, tensors.values())
    arrived = pickle.loads(pickle.dumps(found))
    arrived.values.flags.writeable = False
    assert torch.equal(arrived.tensors()["a.lora_A"].float(), A)


def test_the_digest_is_of_names_shapes_dtypes_and_values() -> None:
    def digest(name: str = "a", factor: torch.Tensor = A) -> str:
        return factor_digest({name: factor}, [factor])

    whole = digest()
    assert digest(factor=A.clone()) == whole
    parts = factor_digest({"a": A}, [A.view(-1)[:2], A.view(-1)[2:]])
    assert parts == whole, "however it is parted"
    others = [digest("b"), digest(factor=A.view(3, 2)), digest(factor=A + 1), digest(factor=A.view(torch.int32))]
    assert len({whole, *others}) == 5


@pytest.mark.parametrize(("place", "value"), [((0, 0), math.nan), ((1, 0), -math.inf), (None, 0.0)])
def test_a_factor_that_is_not_finite_is_named(place: tuple[int, int] | None, value: float) -> None:
    second = B.clone()
    if place is not None:
        second[place] = value
    found = PackedFactors.of({"a": (A, 1.0), "b": (second, 1.0), "c": (second, 1.0)}, "float32")
    assert found.not_finite() == ("" if place is None else "b")


def test_a_factor_that_is_missing_is_noticed() -> None:
    with pytest.raises(AssertionError, match="as many as shapes"):
        PackedFactors.pack(SHAPES, [("a.lora_A", A, 1.0)], "float32")


def test_memory_is_laid_out_anew_only_for_other_factors() -> None:
    memory = FactorMemory()
    flat, places = memory.take({"a": (2, 3), "b": (2,)}, torch.float32)
    assert flat.shape == (8,) and {name: place.shape for name, place in places.items()} == {"a": (2, 3), "b": (2,)}
    places["b"].fill_(7.0)
    assert flat[6:].tolist() == [7.0, 7.0]
    again, _ = memory.take({"a": (2, 3), "b": (2,)}, torch.float32)
    assert again.data_ptr() == flat.data_ptr()
    smaller, _ = memory.take({"a": (2, 3), "b": (2,)}, torch.bfloat16)
    assert (smaller.shape, smaller.dtype, smaller.data_ptr()) == ((8,), torch.bfloat16, flat.data_ptr())
    larger, _ = memory.take({"a": (3, 3)}, torch.float32)
    assert larger.shape == (9,) and larger.data_ptr() != flat.data_ptr()
    assert memory.take({"a": (2, 3)}, torch.float32)[0].shape == (6,)


def test_memory_that_was_given_is_the_one_that_is_used() -> None:
    held = torch.zeros(32, dtype=torch.uint8)
    found = packed(memory=FactorMemory(held))
    assert torch.from_numpy(found.values).data_ptr() == held.data_ptr()
    assert held.view(torch.float32).tolist()[-2:] == [2.0, -8.0]
    with pytest.raises(AssertionError, match="gives enough"):
        FactorMemory(held).take({"a": (9,)}, torch.float32)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedSegment]:
    monkeypatch.setattr(segment, "DIRECTORY", tmp_path)
    made = SharedSegment(40)
    yield made
    made.close()


def test_factors_in_shared_memory_are_read_where_they_lie_and_copied_for_ray(shared: SharedSegment) -> None:
    memories = FactorMemories()
    place = Segment(str(shared.path), shared.nbytes)
    assert memories.at(place) is memories.at(place) and memories.at(None) is memories.at(None) is not memories.at(place)
    written = packed(memory=FactorMemory(shared.buffer))
    factors = SharedFactors(place, written.layout)
    seen = factors.tensors(memories)
    assert list(seen) == ["a.lora_A", "b.lora_B"] and torch.equal(seen["a.lora_A"], A)
    sent = factors.packed(memories, "the digest")
    assert (sent.shapes, sent.dtype, sent.digest) == (written.shapes, "float32", "the digest")
    assert sent.values.tobytes() == written.values.tobytes()
    packed(memory=FactorMemory(shared.buffer)).tensors()
    shared.buffer.view(torch.float32)[0] = 50.0
    assert seen["a.lora_A"][0, 0] == 50.0
    # A layout that was read before is remembered, and so is another one.
    half = SharedFactors(place, packed("bfloat16", FactorMemory(shared.buffer)).layout)
    assert half.tensors(memories)["b.lora_B"].tolist() == [[2.0], [-8.0]]
    shared.close()
    with pytest.raises(WeightSyncError, match="does not exist here"):
        factors.tensors(memories)


def test_a_factor_is_rounded_once_after_it_is_scaled() -> None:
    factor, scale = torch.tensor([[0.1, 0.7, 1.3, 2.9, 33.1, 0.013]]), 1.7
    found = PackedFactors.of({"a": (factor, scale)}, "bfloat16").tensors()["a"]
    twice = factor.bfloat16() * scale
    assert torch.equal(found, (factor * scale).bfloat16()) and not torch.equal(found, twice)


def test_factors_of_one_adapter_after_the_other_lie_in_the_same_memory() -> None:
    memory = FactorMemory()
    first = PackedFactors.pack(
        {"b": (3,), "a": (1,)}, [("b", torch.ones(3), 1.0), ("a", torch.zeros(1), 1.0)], "float32", memory
    )
    digest = first.digest
    second = PackedFactors.pack({"c": (2,)}, [("c", torch.full((2,), 5.0), 1.0)], "float32", memory)
    assert second.tensors()["c"].tolist() == [5.0, 5.0] and first.tensors()["a"].tolist() == [5.0]
    again = PackedFactors.pack(
        {"a": (1,), "b": (3,)}, [("a", torch.zeros(1), 1.0), ("b", torch.ones(3), 1.0)], "float32", memory
    )
    assert again.digest == digest != second.digest and again.values.nbytes == 16


def test_segments_are_unmapped_when_another_is_asked_for_after_their_files_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "DIRECTORY", tmp_path)
    one, two, memories = SharedSegment(8), SharedSegment(8), FactorMemories()
    places = [Segment(str(each.path), 8) for each in (one, two)]
    first = memories.at(places[0])
    assert memories.at(places[1]) is not first and memories.at(places[0]) is first
    one.close()
    assert memories.at(None) is memories.at(None) and places[0].path in memories._mapped
    memories.at(places[1])
    assert list(memories._mapped) == [places[1].path]
    two.close()
