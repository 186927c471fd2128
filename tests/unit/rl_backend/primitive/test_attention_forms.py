"""Attention on other devices: what the flash kernel is given, what a plan keeps, and values of another width than keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_backend.primitive import attention
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.prefix_tree import PrefixTree
from tests.unit.rl_backend.primitive.test_attention import Lengths, masked_softmax, segments_of

LENGTHS = Lengths((3, 1, 5, 70), (3, 6, 5, 90))


def draw(
    heads: int, kv_heads: int, key_dim: int, value_dim: int, lengths: Lengths = LENGTHS
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries, keys = sum(lengths.queries), sum(lengths.keys)
    shapes = (queries, heads, key_dim), (keys, kv_heads, key_dim), (keys, kv_heads, value_dim)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("value_dim", [4, 8, 11])
@pytest.mark.parametrize("window", [None, 2, 30])
def test_values_of_another_width_are_attended_to(value_dim: int, window: int | None) -> None:
    qkv = draw(6, 2, 8, value_dim)
    mix = torch.randn(sum(LENGTHS.queries), 6, value_dim, dtype=torch.float64)
    forms: list[Any] = [lambda q, k, v: packed_attention(q, k, v, segments_of(LENGTHS), window)]
    if window is None:
        forms.append(lambda q, k, v: attention._by_runs(q, k, v, *LENGTHS))
    expected = masked_softmax(*qkv, *LENGTHS, window)
    right = torch.autograd.grad((expected * mix).sum(), qkv)
    for form in forms:
        found = form(*qkv)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad((found * mix).sum(), qkv), right)


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3)])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 8), (8, 5), (5, 8)])
def test_the_flash_kernel_is_given_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
    has_groups: bool,
    heads: int,
    kv_heads: int,
    window: int | None,
    key_dim: int,
    value_dim: int,
) -> None:
    """A stand-in of the kernel, which aligns masks to the last query and key."""
    given: list[dict[str, Any]] = []

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
    ) -> Tensor:
        given.append(options)
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert options.get("enable_gqa", False) or key.shape[1] == value.shape[1] == query.shape[1]
        query_lens, key_lens = cu_q.diff().tolist(), cu_k.diff().tolist()
        assert (max_q, max_k) == (max(query_lens), max(key_lens))
        scale = options.get("scale", query.shape[-1] ** -0.5)
        left, right = options["window_size"]
        assert right == 0
        query = query * (scale * query.shape[-1] ** 0.5)
        return masked_softmax(query, key, value, query_lens, key_lens, None if left == -1 else left + 1)

    monkeypatch.setattr(attention, "_varlen_kernel", lambda: (kernel, has_groups))
    qkv = draw(heads, kv_heads, key_dim, value_dim)
    found = attention.varlen_attention(*qkv, segments_of(LENGTHS), window)
    torch.testing.assert_close(found, masked_softmax(*qkv, *LENGTHS, window))
    assert found.shape[-1] == value_dim
    assert ("enable_gqa" in given[0]) is (has_groups and heads != kv_heads) and ("scale" in given[0]) is (
        key_dim != value_dim
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adds_what_queries_get_from_every_run_in_float32(dtype: torch.dtype) -> None:
    """The queries of the last run have a part of their gradients from each of 60."""
    runs = 60
    tree = PrefixTree((8,) * runs, tuple(range(-1, runs - 1)), tuple(range(runs)))
    lengths = Lengths((tree.num_rows,), (tree.num_rows,))
    inputs = [each.detach().to(dtype) for each in draw(4, 1, 8, 8, lengths)]
    mix = torch.randn(tree.num_rows, 4, 8).to(dtype)
    found = {}
    for wide, whole in ((False, False), (False, True), (True, True)):
        qkv = [x.to(torch.float64 if wide else dtype).requires_grad_() for x in inputs]
        out = packed_attention(*qkv, segments_of(lengths) if whole else Segments.of_tree(tree))
        found[wide, whole] = out, *torch.autograd.grad((out * mix).sum(), qkv)
    of_tree, of_one, right = (
        [each.detach().double() for each in found[key]] for key in ((False, False), (False, True), (True, True))
    )
    for parts, one, exact in zip(of_tree, of_one, right, strict=True):
        assert float((parts - exact).norm()) <= 1.5 * float((one - exact).norm())


@pytest.mark.parametrize("value_dim", [4, 7])
def test_a_plan_has_the_shapes_of_outputs_and_gradients(value_dim: int) -> None:
    query, key, value = (each.detach().to("meta").requires_grad_() for each in draw(6, 2, 4, value_dim))
    out = packed_attention(query, key, value, segments_of(LENGTHS), 3)
    out.sum().backward()
    assert out.shape == (sum(LENGTHS.queries), 6, value_dim)
    for each in (query, key, value):
        assert each.grad is not None and each.grad.shape == each.shape


def test_a_window_that_covers_every_segment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = attention.windowed_attention

    def noted(*arguments: Any) -> Tensor:
        seen.append(arguments[5])
        return plain(*arguments)

    monkeypatch.setattr(attention, "windowed_attention", noted)
    qkv = draw(2, 1, 4, 4)
    for window in (89, 90, 91):
        packed_attention(*qkv, segments_of(LENGTHS), window)
    assert seen == [89]


def test_inputs_and_sinks_stay_as_they_are() -> None:
    lengths = Lengths((5, 2, 5, 2), (5, 2, 5, 2))
    q, k, v = (each.detach() for each in draw(2, 1, 4, 4, lengths))
    before, sinks = [each.clone() for each in (q, k, v)], torch.tensor([0.5, -1.0], dtype=torch.float64)
    packed_attention(q, k, v, segments_of(lengths), None, sinks)
    packed_attention(q, k, v, segments_of(lengths), 2, sinks)
    assert all(torch.equal(*pair) for pair in zip((q, k, v), before, strict=True)) and sinks.tolist() == [0.5, -1.0]
    assert Segments.of_sequences(torch.tensor([0, 5]), [5]).query_lens == (5,)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9])
def test_a_sequence_has_a_score_for_each_key_that_each_query_sees(window: int | None) -> None:
    for keys in range(8):
        assert attention._pairs(keys, window) == sum(min(place + 1, window or 99) for place in range(keys))


@pytest.mark.parametrize("window", [None, 3])
def test_a_plan_counts_the_products_of_scores_and_of_their_gradients(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attend_on_meta" in str(function):
                counted.append(args[2])
            return function(*args, **(kwargs or {}))

    counted: list[int] = []
    monkeypatch.setattr(attention, "_count", lambda like, products: counted.append(products))
    query, key, value = (each.detach().to("meta").requires_grad_() for each in draw(6, 2, 4, 7))
    with Noted():
        packed_attention(query, key, value, segments_of(LENGTHS), window).sum().backward()
    lengths = zip(LENGTHS.queries, LENGTHS.keys, strict=True)
    scores = 6 * sum(min(place + 1, window or 99) for own, keys in lengths for place in range(keys - own, keys))
    # Scores and what they weigh; then scores again, and gradients of scores, weights, queries, keys and values.
    assert counted == [scores * (4 + 7), scores * (3 * 4 + 2 * 7)]


def test_some_segments_begin_where_those_before_them_end() -> None:
    some = segments_of(LENGTHS).some([3, 1])
    assert (some.query_lens, some.key_lens) == ((70, 1), (90, 6)) and some.key_index is None and some.tree is None
    assert some.cu_queries.tolist() == [0, 70, 71] and some.cu_keys.tolist() == [0, 90, 96]
    # What kernels take.
    assert some.cu_queries.dtype == some.cu_keys.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_features_need_not_be_next_to_each_other(dtype: torch.dtype) -> None:
    lengths = Lengths((9, 70), (9, 70))
    contiguous = [each.detach().to(dtype) for each in draw(4, 2, 8, 8, lengths)]
    apart = [each.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_() for each in contiguous]
    assert all(each.stride(-1) != 1 for each in apart)
    together = [each.requires_grad_() for each in contiguous]
    results = []
    for qkv in (apart, together):
        out = packed_attention(qkv[0], qkv[1], qkv[2], segments_of(lengths))
        results.append((out, *torch.autograd.grad(out.float().square().sum(), qkv)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_segments_of_a_tree_begin_at_numbers_that_kernels_take() -> None:
    segments = Segments.of_tree(PrefixTree((2, 3, 1), (-1, 0, 0), (1, 2)))
    assert segments.cu_queries.tolist() == [0, 2, 5, 6] and segments.cu_keys.tolist() == [0, 2, 7, 10]
    assert segments.cu_queries.dtype == segments.cu_keys.dtype == torch.int32
