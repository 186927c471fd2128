"""Attention, normalisation and rotary embedding against their definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.primitive import attention
from rl_backend.primitive import blocked_attention as blocked
from rl_backend.primitive import windowed_attention as windows
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.blocked_attention import blocked_attention
from rl_backend.primitive.norm import RMSNorm
from rl_backend.primitive.rope import Rotary, apply_rotary, rotary_cos_sin

LENGTHS = (1, 64, 65, 3, 3, 200, 2)

type Attention = Callable[[Tensor, Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]


def whole_sequences() -> Segments:
    return Segments.of_sequences(torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), LENGTHS)


def make_qkv(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), count, 8) for count in (heads, kv_heads, kv_heads)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in exact]


def masked_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    window: int | None = None,
) -> Tensor:
    """The definition, with a dense (N, M) mask."""
    segments = torch.arange(len(key_lens))
    of_query, of_key = (
        segments.repeat_interleave(torch.tensor(query_lens)),
        segments.repeat_interleave(torch.tensor(key_lens)),
    )
    query_position = torch.cat([torch.arange(k - q, k) for q, k in zip(query_lens, key_lens, strict=True)])
    key_position = torch.cat([torch.arange(k) for k in key_lens])
    distance = query_position[:, None] - key_position[None]
    visible = (of_query[:, None] == of_key[None]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("implementation", [blocked_attention, attention._by_runs])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_packed_attention_is_causal_attention_within_each_sequence(
    implementation: Attention, heads: int, kv_heads: int
) -> None:
    qkv = make_qkv(heads, kv_heads)
    mix = torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64)
    results = []
    for function in (implementation, masked_softmax):
        out = function(*qkv, LENGTHS, LENGTHS)
        results.append((out, *torch.autograd.grad((out * mix).sum(), qkv)))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("batched_scores", [1, 600, 2**19])
def test_short_sequences_of_equal_length_in_any_order_are_attended_alone(
    monkeypatch: pytest.MonkeyPatch, batched_scores: int
) -> None:
    monkeypatch.setattr(blocked, "_BATCHED_SCORES", batched_scores)
    seq_lens = (5, 64, 3, 5, 130, 3, 5, 64, 65, 5, 1, 130, 1)
    shapes = [(sum(seq_lens), heads, 8) for heads in (4, 2, 2)]
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mix = torch.randn(sum(seq_lens), 4, 8, dtype=torch.float64)
    results = []
    for function in (blocked_attention, masked_softmax):
        out = function(*qkv, seq_lens, seq_lens)
        results.append((out, *torch.autograd.grad((out * mix).sum(), qkv)))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("window", [1, 3, 64, 100, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_a_window_hides_all_but_the_last_tokens(
    monkeypatch: pytest.MonkeyPatch, window: int, heads: int, kv_heads: int
) -> None:
    monkeypatch.setattr(windows, "_BLOCK", 48)
    qkv = make_qkv(heads, kv_heads)
    mix = torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64)
    results = []
    for function in (windows.windowed_attention, attention._windowed_and_whole, masked_softmax):
        out = function(*qkv, LENGTHS, LENGTHS, window)
        results.append((out, *torch.autograd.grad((out * mix).sum(), qkv)))
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])


def test_sequences_that_fit_into_the_window_do_not_pay_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def windowed(
        query: Tensor, key: Tensor, value: Tensor, query_lens: Sequence[int], key_lens: Sequence[int], window: int
    ) -> Tensor:
        seen.extend(query_lens)
        return windows.windowed_attention(query, key, value, query_lens, key_lens, window)

    monkeypatch.setattr(attention, "windowed_attention", windowed)
    packed_attention(*make_qkv(4, 2), whole_sequences(), 64)
    assert seen == [length for length in LENGTHS if length > 64]


def test_a_window_is_used_where_a_sequence_is_longer_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        qkv = make_qkv(4, 2, dtype)
        out = packed_attention(*qkv, whole_sequences(), 64)
        torch.testing.assert_close(
            out.double(), masked_softmax(*make_qkv(4, 2), LENGTHS, LENGTHS, 64), atol=tolerance, rtol=tolerance
        )
        monkeypatch.setattr(attention, "windowed_attention", None)
        assert torch.equal(
            packed_attention(*qkv, whole_sequences(), max(LENGTHS)), packed_attention(*qkv, whole_sequences())
        )
        monkeypatch.undo()


def test_float32_and_bfloat16_on_a_cpu_agree_with_the_definition() -> None:
    expected = masked_softmax(*make_qkv(4, 2), LENGTHS, LENGTHS)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        out = packed_attention(*make_qkv(4, 2, dtype), whole_sequences())
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_attention_scores_far_apart_do_not_overflow() -> None:
    query, key, value = (300.0 * tensor.detach().float() for tensor in make_qkv(2, 1))
    query.requires_grad_()
    out = blocked_attention(query, key, value, LENGTHS, LENGTHS)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(query.grad).all()
    torch.testing.assert_close(out, masked_softmax(query, key, value, LENGTHS, LENGTHS), atol=1e-2, rtol=1e-3)


def test_a_later_token_does_not_change_an_earlier_one() -> None:
    query, key, value = (tensor.detach() for tensor in make_qkv(2, 2))
    before = blocked_attention(query, key, value, LENGTHS, LENGTHS)
    changed = key.clone()
    changed[100] += 1.0  # in the third sequence, tokens 65 to 129
    after = blocked_attention(query, changed, value, LENGTHS, LENGTHS)
    same = torch.ones(sum(LENGTHS), dtype=torch.bool)
    same[100:130] = False
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[100:130], after[100:130])


@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 16)])
def test_rms_norm_equals_its_definition_forward_and_backward(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, mix = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    norm = RMSNorm(16, 1e-5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(16, generator=generator))
    x.requires_grad_()
    reference = F.rms_norm(x, (16,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), reference)
    expected = torch.autograd.grad((reference * mix).sum(), (x, norm.weight))
    torch.testing.assert_close(torch.autograd.grad((norm(x) * mix).sum(), (x, norm.weight)), expected)


def test_rms_norm_computes_bfloat16_in_float32() -> None:
    x = 100.0 * torch.randn(4, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    norm = RMSNorm(64, 1e-6).bfloat16()
    out = norm(x)
    out.float().square().sum().backward()
    assert out.dtype == x.grad.dtype == norm.weight.grad.dtype == torch.bfloat16
    exact = x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()
    torch.testing.assert_close(out.float(), exact, atol=0, rtol=2**-7)


def test_rotary_embedding_rotates_pairs_of_halves_by_position_times_frequency() -> None:
    positions = torch.tensor([0, 5, 1])
    cos, sin = rotary_cos_sin(positions, Rotary(4, 100.0), torch.float64)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    out = apply_rotary(x, cos, sin)
    frequencies = torch.tensor([1.0, 0.1], dtype=torch.float64)
    turned = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(
        torch.ones(3, 1, 2, dtype=torch.float64), positions[:, None, None] * frequencies
    )
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1), atol=1e-6, rtol=1e-6)
    assert torch.equal(out[0], x[0])


def test_rotary_gradient_is_the_rotation_back() -> None:
    cos, sin = rotary_cos_sin(torch.arange(6), Rotary(8, 1e4), torch.float64)
    x = torch.randn(6, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: apply_rotary(value, cos, sin), (x,))
