"""Layers of Megatron beside which adapters work: what they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from rl_backend.contracts import PackedBatch
from rl_backend.primitive.adapters import AdapterRun, Factors, runs_at_work
from rl_backend.runtime.bridge.model import adapters
from rl_backend.runtime.bridge.model.adapters import (
    ChunkAdapters,
    _embed,
    _expert_linear,
    _gate,
    _linear,
    _look_up,
    attach_to_experts,
)
from rl_backend.runtime.bridge.passes.batch import lay_out_padded


def group(rank: int = 0, size: int = 1) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def layer(kind: type, **fields: Any) -> Any:
    made = object.__new__(kind)
    nn.Module.__init__(made)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Plain:
    """A layer whose own ``forward`` and ``gating`` say that they ran."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return ("own", arguments, options)

    gating = forward


def factors(rows: int, columns: int) -> Factors:
    a, b = torch.arange(float(columns)).view(1, columns), torch.arange(1.0, rows + 1).view(rows, 1)
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), 2.0, 0.0, 0)


def chunk_of(modules: dict[str, Factors]) -> ChunkAdapters:
    batch = PackedBatch(torch.tensor([4, 9, 2, 7]), torch.tensor([3, 1]))
    laid_out = lay_out_padded(batch, 2, mark_padding=False)
    chunk = ChunkAdapters()
    chunk.laid_out = type(laid_out)(
        batch, laid_out.inputs, laid_out.shape, laid_out.places, adapters=(AdapterRun(0, 2, modules),)
    )
    return chunk


def test_without_adapters_a_layer_is_megatrons_own() -> None:
    own: Any = Plain()
    chunk = ChunkAdapters()
    for forward in (_linear, _expert_linear):
        assert forward(own, {}, chunk, group(), "x", "y", z=1) == ("own", ("x", "y"), {"z": 1})  # type: ignore[arg-type]
    assert _look_up(own, {}, chunk, group(), "tokens") == ("own", ("tokens",), {})  # type: ignore[arg-type, comparison-overlap]
    assert _gate(own, chunk, torch.zeros(1, 1, 1))[0] == "own"


@pytest.mark.parametrize("splits_outputs", [True, False])
@pytest.mark.parametrize("skip_bias", [True, False])
def test_a_linear_layer_adds_its_adapters_to_real_tokens(
    monkeypatch: pytest.MonkeyPatch, splits_outputs: bool, skip_bias: bool
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        adapters,
        "all_gather",
        lambda x, tp, *, sum_gradients: told.append(("gather", sum_gradients)) or torch.cat((x, x + 1)),
    )
    monkeypatch.setattr(adapters, "reduce_scatter", lambda y, tp: told.append("scatter") or y[:2])  # type: ignore[func-returns-value]
    weight, bias = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 2.0, 3.0])
    kind = ColumnParallelLinear if splits_outputs else RowParallelLinear
    linear = layer(kind, weight=nn.Parameter(weight, requires_grad=False), skip_bias_add=skip_bias)
    linear.register_parameter("bias", nn.Parameter(bias, requires_grad=False))
    chunk = chunk_of({"down": factors(3, 2)})
    assert chunk.laid_out is not None
    whole = torch.arange(16.0).view(4, 2, 2)
    x = whole[:2] if splits_outputs else whole
    y, rest = _linear(linear, {"down": None}, chunk, group(0, 2), x)
    rows = chunk.laid_out.pack(torch.cat((x, x + 1)) if splits_outputs else x)
    a, b, *_ = factors(3, 2)
    product = rows @ weight.t()
    product[:2] += 2 * rows[:2] @ a.t() @ b.t()
    if splits_outputs:
        expected = chunk.laid_out.unpack(product + (0 if skip_bias else bias))
    else:
        # Each rank has a part of the product, and the bias is added once, to padding too.
        expected = chunk.laid_out.unpack(product)[:2] + (0 if skip_bias else bias)
    torch.testing.assert_close(y, expected)
    assert (rest is linear.bias) if skip_bias else rest is None
    assert told == ([("gather", True)] if splits_outputs else ["scatter"])
    assert runs_at_work() == ()
    found, rest = _expert_linear(linear, {"down": None}, chunk, group(0, 2), rows)
    torch.testing.assert_close(found, rows @ weight.t() + (0 if skip_bias else bias))
    assert (rest is linear.bias) if skip_bias else rest is None


@pytest.mark.parametrize("scatters", [True, False])
def test_an_embedding_looks_up_the_words_of_its_rank(monkeypatch: pytest.MonkeyPatch, scatters: bool) -> None:
    monkeypatch.setattr(adapters, "reduce_scatter", lambda hidden, tp: hidden[:2])
    weight = torch.arange(10.0).view(5, 2)
    # The words 4 to 8; the first has the number 0 here, and 9 is the next rank's.
    embedding: Any = SimpleNamespace(weight=weight, vocab_start_index=4, reduce_scatter_embeddings=scatters)
    chunk = chunk_of({})
    assert chunk.laid_out is not None
    found = _look_up(embedding, {"embed": None}, chunk, group(), torch.zeros(2, 4))
    packed = torch.stack([weight[0], torch.zeros(2), torch.zeros(2), weight[3]])
    hidden = chunk.laid_out.unpack(packed)
    assert torch.equal(found, hidden[:2] if scatters else hidden.transpose(0, 1))


def test_a_frozen_embedding_asks_for_gradients_only_where_adapters_train() -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    frozen, chunk = Frozen(), chunk_of({})
    assert _embed(frozen, chunk, torch.zeros(2)).requires_grad
    with torch.no_grad():
        assert not _embed(frozen, chunk, torch.zeros(2)).requires_grad
    assert not _embed(frozen, ChunkAdapters(), torch.zeros(2)).requires_grad
    x = torch.zeros(2, requires_grad=True)
    assert not _embed(frozen, chunk, x).is_leaf


def test_a_chunk_has_its_adapters_while_it_runs_forward_and_again_backward() -> None:
    chunk = ChunkAdapters()
    first, other = chunk_of({}).laid_out, chunk_of({}).laid_out
    assert first is not None and other is not None
    with chunk.forward(first):
        assert chunk.laid_out is first
        output = torch.ones(2, requires_grad=True) * 2
        chunk.before_backward(first, output)
    assert chunk.laid_out is None
    with pytest.raises(KeyError), chunk.forward(other):
        raise KeyError
    assert chunk.laid_out is None
    output.sum().backward()
    assert chunk.laid_out is first
    chunk.laid_out = None
    without = type(first)(first.batch, first.inputs, first.shape, first.places)
    with chunk.forward(without):
        assert chunk.laid_out is None
    chunk.before_backward(without, torch.ones(2, requires_grad=True) * 2)
    chunk.before_backward(first, torch.ones(2))


def test_scores_of_few_rows_are_computed_as_those_of_many() -> None:
    seen: list[tuple[int, ...]] = []

    class Router:
        def gating(self, hidden: Tensor) -> Tensor:
            seen.append(tuple(hidden.shape))
            return hidden.sum(-1, keepdim=True) * torch.tensor([1.0, 10.0])

    router, chunk = Router(), chunk_of({})
    for columns, rows in ((2, 3), (5, 3), (8, 2), (4, 5)):
        hidden = torch.arange(float(columns * rows * 4)).view(columns, rows, 4)
        expected = hidden.sum(-1, keepdim=True) * torch.tensor([1.0, 10.0])
        assert torch.equal(_gate(router, chunk, hidden), expected)
        assert torch.equal(_gate(router, ChunkAdapters(), hidden), expected)
    assert seen[::2] == [(16, 1, 4), (16, 1, 4), (8, 2, 4), (4, 5, 4)] and seen[1] == (2, 3, 4)


@pytest.mark.parametrize(
    ("tp", "tp_size", "ep_size", "expected"),
    [((0, 1), 1, 4, (0, 0, 1)), ((3, 4), 1, 2, (0, 1, 2)), ((5, 6), 2, 2, (0, 1, 2)), ((1, 2), 2, 1, (0, 0, 1))],
)
def test_experts_know_which_share_of_the_tokens_their_ranks_have(
    tp: tuple[int, int], tp_size: int, ep_size: int, expected: tuple[int, int, int]
) -> None:
    experts, router = SimpleNamespace(), SimpleNamespace()
    made = SimpleNamespace(
        token_dispatcher=SimpleNamespace(tp_size=tp_size, ep_size=ep_size), experts=experts, router=router
    )
    chunk = ChunkAdapters()
    attach_to_experts(made, chunk, group(*tp))
    assert tuple(experts.forward.args[4]) == expected and experts.forward.args[2] is chunk
    assert experts.forward.func is adapters._forward and router.gating.args == (router, chunk)
