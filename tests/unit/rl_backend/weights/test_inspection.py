"""Digests, checksums and finite values, of blocks and parts that several threads share."""

from __future__ import annotations

import time
from threading import Barrier, get_ident

import pytest
import torch
import xxhash

from rl_backend.weights import inspection
from rl_backend.weights.inspection import (
    BLOCK_BYTES,
    BlockThreads,
    RunningDigest,
    block_threads,
    copy_with_digest,
    device_checksum,
    each_block,
    has_non_finite,
    inspect_tensor,
    is_zero,
    join_digests,
    tensor_digest,
)


@pytest.mark.parametrize("numel", [0, 5, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES - 1])
def test_a_digest_is_that_of_the_digests_of_blocks(numel: int) -> None:
    tensor = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = bytes(tensor.numpy().tobytes())
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, numel, BLOCK_BYTES)]
    expected = xxhash.xxh3_64_hexdigest(b"".join(xxhash.xxh3_64_digest(block) for block in blocks))
    with block_threads(2) as pool:
        assert tensor_digest(tensor) == tensor_digest(tensor, pool) == expected
        assert inspect_tensor(tensor, pool).digest == copy_with_digest(torch.empty_like(tensor), tensor, pool) == expected
    assert len(expected) == 16


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("nbytes", "sizes"),
    [(0, []), (1, [1]), (BLOCK_BYTES, [BLOCK_BYTES]), (3 * BLOCK_BYTES + 7, [BLOCK_BYTES] * 3 + [7])],
)
def test_work_is_done_for_each_block_in_order(nbytes: int, sizes: list[int], threads: int) -> None:
    with block_threads(threads) as pool:
        assert (pool is None) is (threads == 1)
        found = each_block(nbytes, lambda block: (block.start, len(block)), pool)
    assert found == [(place * BLOCK_BYTES, size) for place, size in enumerate(sizes)]


@pytest.mark.parametrize("others", [1, 3])
def test_every_thread_takes_the_next_part_when_it_has_done_one(others: int) -> None:
    taken: dict[int, int] = {}
    all_are_there = Barrier(others + 1)

    def work(part: int) -> int:
        # Nobody can take a second part before everybody has one.
        if part <= others:
            all_are_there.wait(10)
        taken[part] = get_ident()
        return 2 * part

    with BlockThreads(others) as pool:
        assert pool.share(work, range(9)) == list(range(0, 18, 2))
    assert len({taken[part] for part in range(others + 1)}) == others + 1 and get_ident() in taken.values()


@pytest.mark.parametrize("bad", [0, 3, 7])
def test_a_part_that_fails_is_raised_when_nobody_works_any_more(bad: int) -> None:
    working: set[int] = set()

    def work(part: int) -> None:
        working.add(part)
        time.sleep(0.01)
        working.discard(part)
        if part == bad:
            raise ValueError(f"part {part}")

    with BlockThreads(2) as pool:
        with pytest.raises(ValueError, match=f"part {bad}"):
            pool.share(work, range(8))
        assert not working


def test_a_running_digest_does_not_depend_on_how_tensors_are_parted() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    found = []
    for parts in ([tensor], tensor.split(1), [tensor[:3], tensor[3:], torch.empty(0)], [tensor.t().contiguous().t()]):
        digest = RunningDigest("head")
        for part in parts:
            digest.add(part)
        found.append(str(digest))
    assert set(found) == {xxhash.xxh3_64_hexdigest(b"head" + tensor.numpy().tobytes())}
    other = RunningDigest("other")
    other.add(tensor)
    assert str(other) not in found and str(RunningDigest("head")) == xxhash.xxh3_64_hexdigest(b"head")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_next_to_infinity_and_of_every_sign_are_told_apart(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    finite = torch.tensor([limits.max, limits.min, limits.tiny, -limits.tiny, 0.0, -0.0], dtype=dtype)
    assert inspect_tensor(finite).finite and not has_non_finite(finite)
    for bad in (torch.inf, -torch.inf, torch.nan):
        for place in range(len(finite)):
            values = finite.clone()
            values[place] = bad
            assert not inspect_tensor(values).finite and has_non_finite(values)
    # NaN of either sign, with the least bits set.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for sign in (1.0, -1.0):
        values = torch.tensor([sign * torch.inf]).to(dtype)
        values.view(bits).add_(1)
        assert values.isnan().all() and not inspect_tensor(values).finite


def test_a_bad_value_in_the_last_block_is_found_by_threads_too() -> None:
    values = torch.zeros(3 * BLOCK_BYTES // 4 + 1)
    values[-1] = torch.inf
    with block_threads(2) as pool:
        assert not inspect_tensor(values, pool).finite
        values[-1] = 0.0
        assert inspect_tensor(values, pool).finite


def test_dtypes_without_known_bits_are_looked_at_too() -> None:
    values = torch.tensor([1.0, 2.0]).to(torch.float8_e5m2)
    assert inspect_tensor(torch.tensor([True, False])) == (tensor_digest(torch.tensor([True, False])), True)
    assert tensor_digest(values) == tensor_digest(values.view(torch.uint8))


def test_a_copy_is_of_what_a_tensor_reads_as_and_leaves_it_alone() -> None:
    for tensor in (
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(3.0, requires_grad=True),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch._neg_view(torch.arange(3.0)),
    ):
        before, place = tensor.detach().clone(), torch.empty(tensor.shape, dtype=tensor.dtype)
        digest = copy_with_digest(place, tensor)
        assert torch.equal(place, before) and torch.equal(tensor.detach(), before)
        assert digest == tensor_digest(before.contiguous().resolve_conj().resolve_neg())


@pytest.mark.parametrize(("numel", "word"), [(12, 4), (13, 1), (8, 4), (3, 1)])
def test_a_checksum_is_the_sum_of_words_or_of_bytes(monkeypatch: pytest.MonkeyPatch, numel: int, word: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)
    data = bytes(tensor.tolist())
    words = [data[start : start + word] for start in range(0, numel, word)]
    expected = sum(int.from_bytes(each, "little", signed=word == 4) for each in words)
    for limit in (1 << 26, 16):  # in one part, and in parts of 8 or 2 bytes
        monkeypatch.setattr(inspection, "CHECKSUM_BYTES", limit)
        found = device_checksum(tensor)
        assert int(found) == expected and found.dtype == torch.int64 and found.dim() == 0
    assert int(device_checksum(torch.empty(0))) == 0
    # In a buffer of many tensors one may begin anywhere.
    buffer = torch.cat((torch.zeros(1, dtype=torch.uint8), tensor))
    assert int(device_checksum(buffer[1:])) == expected


def test_zero_bytes_are_zeros_and_a_negative_zero_is_not_one_of_them() -> None:
    assert is_zero(torch.zeros(3, 4)) and is_zero(torch.empty(0))
    assert not is_zero(-torch.zeros(3))
    assert is_zero(torch.zeros(1, dtype=torch.uint8)) and not is_zero(torch.ones(1, dtype=torch.uint8))
    first = torch.zeros(9, dtype=torch.uint8)
    for place in range(9):
        first[place] = 1
        assert not is_zero(first)
        first[place] = 0


def test_sums_that_are_not_finite_are_looked_at_number_by_number() -> None:
    large = torch.full((3 << 20,), 60000.0, dtype=torch.float16)
    large[: 2 << 20] = 0.0
    assert not has_non_finite(large)
    large[-1] = torch.inf
    assert has_non_finite(large)
    assert has_non_finite(torch.tensor([[1.0], [torch.nan]])) and not has_non_finite(torch.tensor([7], dtype=torch.int8))


def test_joined_digests_depend_on_their_order() -> None:
    one, other = xxhash.xxh3_64_digest(b"1"), xxhash.xxh3_64_digest(b"2")
    assert join_digests([one, other]) == xxhash.xxh3_64_hexdigest(one + other) != join_digests([other, one])
