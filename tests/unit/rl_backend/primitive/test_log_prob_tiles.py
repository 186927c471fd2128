"""Tiles of logits: how tokens and vocabulary are cut, what a tile has, and what a plan is told of their size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.primitive import log_prob
from rl_backend.primitive.float32 import wide_dtype
from rl_backend.primitive.log_prob import (
    LowRank,
    NextTokenGradient,
    Tile,
    Tokens,
    add_matmul,
    buffers_for,
    kept_logits_bytes,
    logits_chunk_bytes,
    vocabulary_slices,
)

HIDDEN, VOCABULARY = 4, 11


def tokens_of(count: int, *, several: bool = False, temperature: Tensor | float = 1.0, start: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, HIDDEN, generator=generator)
    labels = torch.arange(count)[:, None] % VOCABULARY
    active = torch.ones(count, dtype=torch.bool)
    return Tokens.select(hidden, labels, temperature, active, start, several=several)[0]


def bounds(slices: list[slice]) -> list[tuple[int, int]]:
    return [(each.start, each.stop) for each in slices]


@pytest.mark.parametrize(
    ("count", "size", "several", "expected"),
    [
        (0, 4, False, []),
        (0, 4, True, []),
        (10, 4, False, [(0, 4), (4, 8), (8, 10)]),
        (10, 20, False, [(0, 10)]),
        (8, 4, False, [(0, 4), (4, 8)]),
        (34, 16, True, [(0, 12), (12, 24), (24, 34)]),
        (33, 16, True, [(0, 11), (11, 22), (22, 33)]),
        (32, 16, True, [(0, 16), (16, 32)]),
        (20, 64, True, [(0, 20)]),
    ],
)
def test_chunks_are_full_or_where_adapters_share_as_equal_as_can_be(
    count: int, size: int, several: bool, expected: list[tuple[int, int]]
) -> None:
    tokens = tokens_of(count)._replace(several=several)
    assert bounds(tokens.chunks(size)) == expected
    assert tokens.rows_of_tile(size) == (size if several else min(size, count))


def test_the_tokens_at_work_are_chosen_with_their_temperatures_and_products() -> None:
    hidden, labels = torch.randn(5, HIDDEN), torch.arange(5)[:, None] * 2
    active = torch.tensor([False, True, True, False, True])
    narrow, matrix = torch.randn(5, 2), torch.randn(VOCABULARY, 2)
    by_token = torch.linspace(0.5, 2.5, 5)
    tokens, positions = Tokens.select(hidden, labels, by_token, active, 3, LowRank(narrow, matrix, torch.zeros_like(matrix)))
    assert positions.tolist() == [1, 2, 4] and tokens.labels.tolist() == [[2], [4], [8]] and tokens.start == 3
    assert torch.equal(tokens.hidden, hidden[positions])
    assert tokens.temperature is not None and tokens.temperature.tolist() == [[1.0], [1.5], [2.5]]
    assert tokens.added is not None and torch.equal(tokens.added.narrow, narrow[positions])
    assert tokens.added.wide is matrix and not tokens.several and tokens.bias is None
    assert Tokens.select(hidden, labels, 1.0, active, 0)[0].temperature is None
    same, _ = Tokens.select(hidden.double(), labels, 0.5, active, 0)
    assert same.temperature is not None and same.temperature.tolist() == [[0.5]] * 3
    assert same.temperature.dtype == torch.float64
    half, _ = Tokens.select(hidden.bfloat16(), labels, 0.7, active, 0)
    assert half.temperature is not None and half.temperature.dtype == torch.float32


@pytest.mark.parametrize(("count", "expected"), [(1, 16), (3, 16), (15, 16), (16, 16), (17, 17), (0, 0)])
def test_few_tokens_of_several_adapters_are_made_enough(count: int, expected: int) -> None:
    hidden, labels, active = torch.randn(20, HIDDEN), torch.arange(20)[:, None], torch.arange(20) >= 20 - count
    tokens, positions = Tokens.select(hidden, labels, 1.0, active, 0, several=True)
    first = [20 - count] * (expected - count)
    assert positions.tolist() == [*range(20 - count, 20), *first] and len(tokens.hidden) == expected
    alone, own = Tokens.select(hidden, labels, 1.0, active, 0)
    assert len(own) == count == len(alone.labels)


def test_all_tokens_of_a_plan_are_at_work() -> None:
    hidden, labels = torch.empty(7, HIDDEN, device="meta"), torch.empty(7, 1, dtype=torch.int64, device="meta")
    tokens, positions = Tokens.select(hidden, labels, 1.0, (labels != -100).any(1), 0)
    assert tokens.hidden.shape == (7, HIDDEN) and positions.shape == (7,) and positions.is_meta


@pytest.mark.parametrize("temperature", [1.0, 0.5, torch.linspace(0.5, 2.0, 9)])
def test_a_tile_has_the_logits_of_its_tokens_and_words(temperature: Tensor | float) -> None:
    """The second chunk of tokens and the second part of a rank's words, which begin at token 20."""
    generator = torch.Generator().manual_seed(0)
    tokens = tokens_of(9, temperature=temperature, start=20)
    narrow, matrix = torch.randn(9, 2, generator=generator), torch.randn(VOCABULARY, 2, generator=generator)
    weight, bias = torch.randn(VOCABULARY, HIDDEN, generator=generator), torch.randn(VOCABULARY, generator=generator)
    labels = torch.tensor([[0, 0], [0, 0], [0, 0], [25, 30], [29, 25], [24, 29], [30, -100], [-100, 26], [0, 0]])
    tokens = tokens._replace(labels=labels, added=LowRank(narrow, matrix, torch.zeros_like(matrix)), bias=bias)
    chunk, words = slice(3, 8), slice(5, 10)
    tile = Tile.of(tokens, chunk, weight, words)
    assert tile.inside.tolist() == [[True, False], [True, True], [False, True], [False, False], [False, True]]
    assert tile.column.tolist() == [[0, 0], [4, 0], [0, 4], [0, 0], [0, 1]]
    found = tile.logits(torch.full((40,), 7.0))
    whole = tokens.hidden @ weight.t() + narrow @ matrix.t() + bias
    whole = whole / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    torch.testing.assert_close(found, whole[chunk, words])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0, 1])
def test_a_product_is_added_in_the_wider_dtype(dtype: torch.dtype, beta: int) -> None:
    a, b = torch.randn(3, 5).to(dtype), torch.randn(5, 4).to(dtype)
    out = torch.full((3, 4), 2.0)
    add_matmul(out, a, b, beta=beta)
    torch.testing.assert_close(out, 2.0 * beta + a.float() @ b.float())


def test_memory_is_that_of_the_largest_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", 3000)
    weight = torch.randn(1000, HIDDEN, dtype=torch.bfloat16)
    for count, chunk, several, words, elements in (
        (10, 8, False, 375, 8 * 375),
        (2, 8, False, 1000, 2 * 1000),
        (2, 8, True, 375, 8 * 375),
        (10, 100, False, 300, 10 * 300),
        (200, 100, False, 256, 100 * 256),
    ):
        tokens = tokens_of(count)._replace(several=several)
        buffers = buffers_for(tokens, weight, chunk, count=2)
        assert [(buffer.numel(), buffer.dtype) for buffer in buffers] == [(elements, torch.float32)] * 2
        slices = vocabulary_slices(tokens, weight, chunk)
        assert bounds(slices) == [(start, min(start + words, 1000)) for start in range(0, 1000, words)]


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk", "entropy", "expected"),
    [
        (4096, 1000, 1024, False, 1024 * 1000 * 4),
        (100, 1000, 1024, False, 100 * 1000 * 4),
        (100, 1000, 1024, True, 2 * 100 * 1000 * 4),
        (4096, 200_000, 1024, True, 2 * 2**26 * 4),
        (2**20, 200_000, 2**19, False, 2**19 * 256 * 4),
    ],
)
def test_a_plan_knows_the_bytes_of_logits(tokens: int, vocabulary: int, chunk: int, entropy: bool, expected: int) -> None:
    assert logits_chunk_bytes(tokens, vocabulary, chunk, calculate_entropy=entropy) == expected


def test_sums_are_float32_or_better() -> None:
    assert [wide_dtype(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.float64,
    ]


def test_a_probability_of_0_has_no_gradient_of_entropy() -> None:
    weight = torch.tensor([[0.0], [1.0], [-1.0]])
    tokens = Tokens(torch.tensor([[2000.0]]), torch.tensor([[1]]), None, 0)
    tile = Tile.of(tokens, slice(0, 1), weight, slice(0, 3))
    one = torch.ones(1, 1)
    gradient = NextTokenGradient(0 * one, one, 0 * one, 2000.0 * one)
    found = gradient.of_logits(slice(0, 1), tile, tile.logits(torch.empty(3)), [torch.empty(3), torch.empty(3)])
    assert found.tolist() == [[0.0, 0.0, 0.0]]


def test_a_plan_knows_which_logits_stay_for_the_backward_pass() -> None:
    most = 2**30 // (1000 * 4)
    assert kept_logits_bytes(10, 4, 1000) == 4 * 1000 * 4
    assert kept_logits_bytes(most, 7, 1000) == 7 * 1000 * 4 and kept_logits_bytes(most + 1, 7, 1000) == 0
    assert kept_logits_bytes(10, 4, 0) == 0, "a rank may have no part of a small vocabulary"
