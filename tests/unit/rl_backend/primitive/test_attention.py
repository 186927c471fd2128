"""Attention against its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.primitive import attention
from rl_backend.primitive.attention import Segments, packed_attention


class Lengths(NamedTuple):
    queries: tuple[int, ...]
    keys: tuple[int, ...]


LENGTHS = (1, 64, 65, 3, 3, 200, 2)
WHOLE = Lengths(LENGTHS, LENGTHS)
LAST_TOKENS = Lengths((1, 32, 65, 3, 3, 100, 2, 64, 2), (7, 64, 66, 3, 9, 200, 2, 128, 200))
ALL_LENGTHS = pytest.mark.parametrize("lengths", [WHOLE, LAST_TOKENS], ids=["whole sequences", "last tokens"])

type Attention = Callable[..., Tensor]


def segments_of(lengths: Lengths) -> Segments:
    cumulative = [torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in lengths]
    return Segments(*lengths, *cumulative)


def packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return packed_attention(query, key, value, segments_of(Lengths(tuple(query_lens), tuple(key_lens))), window, sinks)


def make_qkv(
    heads: int, kv_heads: int, lengths: Lengths = WHOLE, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = sum(lengths.queries), sum(lengths.keys)
    shapes = [(num_queries, heads, 8), (num_keys, kv_heads, 8), (num_keys, kv_heads, 8)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.to(dtype).requires_grad_(), key.to(dtype).requires_grad_(), value.to(dtype).requires_grad_()


def masked_softmax(
    query: Tensor, key: Tensor, value: Tensor, query_lens: Sequence[int], key_lens: Sequence[int], window: int | None = None
) -> Tensor:
    """The definition, with a dense (N, M) mask."""
    segments = torch.arange(len(query_lens))
    segment_of_query, segment_of_key = (segments.repeat_interleave(torch.tensor(lens)) for lens in (query_lens, key_lens))
    position_of_query = torch.cat([torch.arange(k - q, k) for q, k in zip(query_lens, key_lens, strict=True)])
    distance = position_of_query[:, None] - torch.cat([torch.arange(length) for length in key_lens])
    visible = (segment_of_query[:, None] == segment_of_key) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def assert_as_defined(function: Attention, heads: int, kv_heads: int, lengths: Lengths, window: Sequence[int] = ()) -> None:
    """Output and gradients."""
    qkv = make_qkv(heads, kv_heads, lengths)
    mix = torch.randn(qkv[0].shape, dtype=torch.float64)
    results = []
    for candidate in (function, masked_softmax):
        out = candidate(*qkv, *lengths, *window)
        results.append((out, *torch.autograd.grad((out * mix).sum(), qkv)))
    torch.testing.assert_close(results[0], results[1])


@ALL_LENGTHS
@pytest.mark.parametrize("implementation", [packed, attention._by_runs])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_packed_attention_is_causal_attention_within_each_segment(
    implementation: Attention, heads: int, kv_heads: int, lengths: Lengths
) -> None:
    assert_as_defined(implementation, heads, kv_heads, lengths)


@pytest.mark.parametrize("more_keys", [0, 7, 100])
def test_segments_of_equal_lengths_in_any_order_are_attended_alone(more_keys: int) -> None:
    queries = (5, 64, 3, 5, 130, 3, 5, 64, 65, 5, 1, 130, 1)
    keys = tuple(length + more_keys * (index % 3 == 0) for index, length in enumerate(queries))
    assert_as_defined(packed, 4, 2, Lengths(queries, keys))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("more_keys", [0, 33])
@pytest.mark.parametrize("length", [65, 200, 770])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (4, 1, 16), (1, 1, 64), (9, 3, 64)])
def test_segments_have_the_bits_of_each_alone(
    heads: int, kv_heads: int, dim: int, length: int, more_keys: int, has_sinks: bool
) -> None:
    torch.manual_seed(0)
    count, keys = 3, length + more_keys
    query, key, value = (
        torch.randn(count * rows, each, dim) for rows, each in ((length, heads), (keys, kv_heads), (keys, kv_heads))
    )
    sinks = torch.randn(heads) if has_sinks else None

    def attend(count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = packed(q, k, v, [length] * count, [keys] * count, None, sinks)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    out, grad_query, grad_key, grad_value = attend(count, query, key, value)
    for number in range(count):
        own, seen = (slice(number * rows, (number + 1) * rows) for rows in (length, keys))
        alone = attend(1, query[own], key[seen], value[seen])
        beside = out[own], grad_query[own], grad_key[seen], grad_value[seen]
        assert all(map(torch.equal, alone, beside))


@ALL_LENGTHS
@pytest.mark.parametrize("window", [1, 3, 64, 100, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("implementation", [attention.windowed_attention, packed])
def test_a_window_hides_all_but_the_last_tokens(
    monkeypatch: pytest.MonkeyPatch, implementation: Attention, window: int, heads: int, kv_heads: int, lengths: Lengths
) -> None:
    monkeypatch.setattr(attention, "_WINDOWED_BLOCK", 48)
    assert_as_defined(implementation, heads, kv_heads, lengths, [window])


@ALL_LENGTHS
def test_segments_that_fit_into_the_window_do_not_pay_for_it(monkeypatch: pytest.MonkeyPatch, lengths: Lengths) -> None:
    seen: list[int] = []
    original = attention.windowed_attention

    def windowed(
        query: Tensor, key: Tensor, value: Tensor, query_lens: Sequence[int], key_lens: Sequence[int], *others: Any
    ) -> Tensor:
        seen.extend(key_lens)
        return original(query, key, value, query_lens, key_lens, *others)

    monkeypatch.setattr(attention, "windowed_attention", windowed)
    packed_attention(*make_qkv(4, 2, lengths), segments_of(lengths), 64)
    assert seen == [length for length in lengths.keys if length > 64]


@ALL_LENGTHS
def test_a_window_is_used_where_a_segment_has_more_keys_and_only_there(
    monkeypatch: pytest.MonkeyPatch, lengths: Lengths
) -> None:
    segments, expected = segments_of(lengths), masked_softmax(*make_qkv(4, 2, lengths), *lengths, 64)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        out = packed_attention(*make_qkv(4, 2, lengths, dtype), segments, 64)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    monkeypatch.setattr(attention, "windowed_attention", None)
    qkv = make_qkv(4, 2, lengths)
    assert torch.equal(packed_attention(*qkv, segments, max(lengths.keys)), packed_attention(*qkv, segments))


@ALL_LENGTHS
def test_float32_and_bfloat16_on_a_cpu_agree_with_the_definition(lengths: Lengths) -> None:
    expected = masked_softmax(*make_qkv(4, 2, lengths), *lengths)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        out = packed_attention(*make_qkv(4, 2, lengths, dtype), segments_of(lengths))
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_whole_sequences_have_as_many_keys_as_queries() -> None:
    cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32)
    segments = Segments.of_sequences(cu_seqlens, [3, 1])
    assert segments.query_lens == segments.key_lens == (3, 1)
    assert segments.cu_queries is segments.cu_keys is cu_seqlens
    assert segments.key_index is None


@ALL_LENGTHS
def test_attention_scores_far_apart_do_not_overflow(lengths: Lengths) -> None:
    query, key, value = (300.0 * tensor.detach().float() for tensor in make_qkv(2, 1, lengths))
    query.requires_grad_()
    out = packed(query, key, value, *lengths)
    out.sum().backward()
    assert query.grad is not None
    assert torch.isfinite(out).all() and torch.isfinite(query.grad).all()
    torch.testing.assert_close(out, masked_softmax(query, key, value, *lengths), atol=1e-2, rtol=1e-3)


def test_a_later_token_does_not_change_an_earlier_one() -> None:
    query, key, value = (tensor.detach() for tensor in make_qkv(2, 2))
    before = packed(query, key, value, *WHOLE)
    changed = key.clone()
    changed[100] += 1.0  # in the third sequence, tokens 65 to 129
    after = packed(query, changed, value, *WHOLE)
    same = torch.ones(sum(LENGTHS), dtype=torch.bool)
    same[100:130] = False
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[100:130], after[100:130])
