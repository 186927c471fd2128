"""Attention sinks against their definition, in every form of attention."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rl_backend.primitive import attention
from rl_backend.primitive.attention import packed_attention
from tests.unit.rl_backend.primitive.test_attention import ALL_LENGTHS, Lengths, make_qkv, packed, segments_of

HEADS, KV_HEADS = 6, 2


def make_sinks(dtype: torch.dtype = torch.float64) -> Tensor:
    """From one that hardly counts to one beside which keys hardly count."""
    return torch.linspace(-3.0, 4.0, HEADS, dtype=torch.float64).to(dtype).requires_grad_()


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, query_lens: Sequence[int], key_lens: Sequence[int], window: int, sinks: Tensor
) -> Tensor:
    """The definition: a softmax over the scores of what each query sees and its head's sink, which is then dropped."""
    outputs, first_query, first_key = [], 0, 0
    for queries, keys in zip(query_lens, key_lens, strict=True):
        for number in range(queries):
            last = keys - queries + number
            seen = slice(first_key + max(0, last - window + 1), first_key + last + 1)
            k, v = (x[seen].repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
            scores = torch.einsum("hd,khd->hk", query[first_query + number], k) * query.shape[-1] ** -0.5
            shares = torch.cat((scores, sinks[:, None]), 1).softmax(-1)[:, :-1]
            outputs.append(torch.einsum("hk,khd->hd", shares, v))
        first_query, first_key = first_query + queries, first_key + keys
    return torch.stack(outputs)


@pytest.mark.shows("model: attention sinks and their gradients are those of the definition, whole and with windows")
@ALL_LENGTHS
@pytest.mark.parametrize("form", ["whole", "windowed", "both"])
def test_a_sink_takes_its_share_of_the_softmax(form: str, lengths: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_WINDOWED_BLOCK", 48)
    window = 1000 if form == "whole" else 20
    found = attention.windowed_attention if form == "windowed" else packed
    qkv, sinks = make_qkv(HEADS, KV_HEADS, lengths), make_sinks()
    mix = torch.randn(qkv[0].shape, dtype=torch.float64)
    results = []
    for function in (found, one_by_one):
        out = function(*qkv, *lengths, window, sinks)  # type: ignore[operator]
        results.append((out, *torch.autograd.grad((out * mix).sum(), (*qkv, sinks))))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@ALL_LENGTHS
def test_every_dtype_on_a_cpu_has_sinks(lengths: Lengths, dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    expected = one_by_one(*make_qkv(HEADS, KV_HEADS, lengths), *lengths, window or 1000, make_sinks())
    sinks = make_sinks(dtype)
    out = packed_attention(*make_qkv(HEADS, KV_HEADS, lengths, dtype), segments_of(lengths), window, sinks)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    out.sum().backward()
    assert sinks.grad is not None and sinks.grad.dtype == dtype and bool(sinks.grad.all())


def test_sinks_far_above_or_below_the_scores_do_not_overflow() -> None:
    lengths = Lengths((65, 3), (65, 3))
    sinks = (300.0 * make_sinks(torch.float32)).detach().requires_grad_()
    out = packed_attention(*make_qkv(HEADS, KV_HEADS, lengths, torch.float32), segments_of(lengths), None, sinks)
    out.sum().backward()
    assert sinks.grad is not None
    assert torch.isfinite(out).all() and torch.isfinite(sinks.grad).all()


def test_a_plan_knows_what_sinks_keep() -> None:
    lengths = Lengths((65, 3), (65, 3))
    query, key, value, sinks = (x.detach().to("meta").requires_grad_() for x in (*make_qkv(6, 2, lengths), make_sinks()))
    packed_attention(query, key, value, segments_of(lengths), None, sinks).sum().backward()
    assert sinks.grad is not None and sinks.grad.shape == sinks.shape


@pytest.mark.shows("model: memory of attention sinks in bfloat16 grows with the length and not with its square")
@pytest.mark.parametrize("window", [None, 128])
def test_what_is_kept_for_the_backward_pass_grows_with_the_length(window: int | None) -> None:
    def kept(length: int) -> int:
        qkv, sinks = make_qkv(HEADS, KV_HEADS, Lengths((length,), (length,)), torch.bfloat16), make_sinks(torch.bfloat16)
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            packed_attention(*qkv, segments_of(Lengths((length,), (length,))), window, sinks)
        return sum(storages.values())

    assert kept(2048) <= 2.2 * kept(1024)


def test_a_planned_pass_counts_the_scores_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    new_empty = Tensor.new_empty

    def counted(self: Tensor, *size: object, **options: object) -> Tensor:
        made.append(new_empty(self, *size, **options).numel())  # type: ignore[arg-type]
        return new_empty(self, *size, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Tensor, "new_empty", counted)
    lengths = Lengths((700, 9), (700, 9))
    qkv = tuple(x.detach().to("meta").requires_grad_() for x in make_qkv(HEADS, KV_HEADS, lengths, torch.bfloat16))
    sinks = make_sinks(torch.bfloat16).detach().to("meta").requires_grad_()
    for window, keys in ((None, 700), (100, 612)):
        made.clear()
        packed_attention(*qkv, segments_of(lengths), window, sinks).sum().backward()
        assert HEADS * 512 * (keys + 1) in made and 2 * HEADS * 512 * (keys + 1) in made
