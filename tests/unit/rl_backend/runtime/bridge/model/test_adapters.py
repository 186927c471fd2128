"""Attention and experts of a Megatron model where adapters are at work beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.adapters import AdapterRun, runs_at_work
from rl_backend.primitive.attention import Segments
from rl_backend.runtime.bridge.model import adapters
from rl_backend.runtime.bridge.model.adapters import ChunkAdapters, _attend
from rl_backend.runtime.bridge.passes.batch import lay_out_padded
from tests.support.native import micro_batches


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(20, 12), (8, 28), (16, 16)])
def test_attention_beside_adapters_has_the_models_own_scale_and_values_of_any_width(
    window: int | None, key_dim: int, value_dim: int
) -> None:
    batch, scale, heads = micro_batches([[0, 2, 4]])[0], 0.3, 2
    lengths = batch.seq_lens.tolist()
    laid_out = lay_out_padded(batch, 1, mark_padding=False)
    chunk = ChunkAdapters()
    chunk.laid_out = replace(laid_out, segments=Segments.of_sequences(batch.cu_seqlens, lengths))
    rows, columns = laid_out.shape
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(columns, rows, heads, size, generator=generator) for size in (key_dim, key_dim, value_dim)
    )
    found = _attend(None, chunk, scale, window, query, key, value)
    assert found.shape == (columns, rows, heads * value_dim)
    for row, length in enumerate(lengths):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (window or length))
        q, k, v = (each[:length, row] for each in (query, key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        torch.testing.assert_close(found[:length, row], attended.flatten(1), rtol=1e-4, atol=1e-5)
        assert not found[length:, row].any()


@pytest.mark.parametrize(
    ("counts", "order"),
    [([3, 2], None), ([3, 2], [2, 0, 1, 4, 3]), ([0, 5], [1, 2, 3, 4, 0]), ([4, 0], [3, 0, 2, 1])],
    ids=str,
)
def test_rows_of_experts_come_back_as_they_were_sent(
    monkeypatch: pytest.MonkeyPatch, counts: Sequence[int], order: Sequence[int] | None
) -> None:
    """Whatever order they are put in for their adapters, each with its own weight."""
    runs = [[AdapterRun(0, count, {}, key=number)] for number, count in enumerate(counts)]
    seen: list[Sequence[AdapterRun]] = []

    def expert(number: int, own: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        seen.append(runs_at_work())
        return (number + 1) * own * weights[:, None], None

    def sort(*_: object) -> tuple[Tensor, Sequence[Sequence[AdapterRun]]]:
        return torch.tensor(order), runs

    monkeypatch.setattr(adapters, "row_owners", lambda *_: None if order is None else "owners")
    monkeypatch.setattr(adapters, "_sorted", sort)
    experts = SimpleNamespace(
        local_experts=[lambda own, weights, number=number: expert(number, own, weights) for number in range(len(counts))]
    )
    chunk = ChunkAdapters()
    laid_out: Any = SimpleNamespace(adapters=(), batch=SimpleNamespace(num_tokens=sum(counts)))
    chunk.laid_out = laid_out
    rows = torch.arange(2.0 * sum(counts)).view(-1, 2)
    probs = torch.linspace(0.5, 1.0, sum(counts))
    nothing: Any = None
    found, bias = adapters._forward(experts, nothing, chunk, nothing, nothing, rows, torch.tensor(counts), probs)
    factors = torch.arange(1.0, len(counts) + 1).repeat_interleave(torch.tensor(counts))
    torch.testing.assert_close(found, rows * (factors * probs)[:, None])
    assert bias is None
    assert [list(each) for each in seen] == ([[]] * len(counts) if order is None else runs)
