"""The indexer's choice, attention to what is chosen, and the indexer's loss, against the published formulas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.lab.plan.native import LiveBytes
from rl_backend.model.mixers.mla import Indexer, IndexerSpec
from rl_backend.primitive import sparse_attention as module
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.rope import Rotary, rotary_cos_sin
from rl_backend.primitive.sparse_attention import IndexTerms, choose_keys, index_scores, indexer_loss, sparse_attention
from tests.support import plain_sparse

LENGTHS = (1, 7, 2, 13, 5)
HEADS, DIM, INDEX_HEADS, INDEX_DIM = 3, 6, 5, 4
SCALE = 0.37


def segments_of(lengths: Sequence[int]) -> Segments:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Segments.of_sequences(starts, lengths)


def draw(lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float64) -> tuple[IndexTerms, Tensor, Tensor, Tensor]:
    """Index terms, and queries, keys and values, all leaves."""
    total = sum(lengths)
    torch.manual_seed(3)
    shapes = (total, INDEX_HEADS, INDEX_DIM), (total, INDEX_DIM), (total, INDEX_HEADS)
    terms = IndexTerms(*(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes))
    sizes = (DIM, DIM, DIM + 2)
    query, key, value = (torch.randn(total, HEADS, size, dtype=dtype, requires_grad=True) for size in sizes)
    return terms, query, key, value


@pytest.fixture(params=[2**24, 40])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block for a sequence, or one for each of a few queries."""
    monkeypatch.setattr(module, "_MOST_SCORES", request.param)


@pytest.mark.shows(
    "sparse attention: choice, attention, both losses and all gradients equal the published formulas to 1e-12"
)
@pytest.mark.parametrize("top_k", [1, 4, 12, 40])
@pytest.mark.parametrize("dense_loss", [False, True])
def test_packed_sequences_equal_the_formulas_one_by_one(top_k: int, dense_loss: bool, small_blocks: None) -> None:
    terms, query, key, value = draw()
    segments = segments_of(LENGTHS)
    chosen = choose_keys(terms, segments, top_k)
    out = sparse_attention(query, key, value, segments, chosen)
    loss = indexer_loss(terms, query, key, segments, None if dense_loss else chosen, SCALE)
    upstream = torch.randn_like(out)
    leaves = (*terms, query, key, value)
    found = torch.autograd.grad((out * upstream).sum() + 0.7 * loss, leaves)

    expected, expected_loss = [], query.new_zeros(())
    parts = [each.split(LENGTHS) for each in leaves]
    for iq, ik, iw, q, k, v in zip(*parts, strict=True):
        rows = plain_sparse.scores(iq, ik, iw)
        keys = plain_sparse.choices(rows, top_k)
        expected.append(plain_sparse.attention(q, k, v, keys, DIM**-0.5))
        everything = [list(range(t + 1)) for t in range(len(rows))]
        expected_loss = expected_loss + plain_sparse.divergence(rows, q, k, everything if dense_loss else keys, SCALE)
        mine, chosen = chosen[: len(rows)], chosen[len(rows) :]
        assert [[int(s) for s in row if s >= 0] for row in mine] == keys
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-12, rtol=0)
    torch.testing.assert_close(loss, expected_loss, atol=1e-11, rtol=0)
    whole = (torch.cat(expected) * upstream).sum() + 0.7 * expected_loss
    for one, other in zip(found, torch.autograd.grad(whole, leaves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


@pytest.mark.shows("sparse attention: of equal scores the first keys are chosen, and no later token changes a choice")
def test_ties_are_broken_by_the_lowest_number_whatever_comes_later(small_blocks: None) -> None:
    torch.manual_seed(0)
    # Whole numbers, mostly zero: ties everywhere, and exact.
    whole = IndexTerms(
        torch.randint(-1, 2, (60, 2, 3)).float(),
        torch.randint(-1, 2, (60, 3)).float(),
        torch.randint(-1, 2, (60, 2)).float(),
    )
    chosen = choose_keys(whole, segments_of([60]), 9)
    rows = plain_sparse.scores(*whole)
    assert len({float(score) for score in rows[-1]}) < 15, "there are ties"
    assert [[int(s) for s in row if s >= 0] for row in chosen] == plain_sparse.choices(rows, 9)
    for length in (1, 9, 10, 31, 59):
        short = IndexTerms(*(each[:length] for each in whole))
        assert torch.equal(choose_keys(short, segments_of([length]), 9), chosen[:length])
    zeros = IndexTerms(*(torch.zeros_like(each) for each in whole))
    assert torch.equal(choose_keys(zeros, segments_of([60]), 9)[8:], torch.arange(9, dtype=torch.int32).expand(52, 9))


def test_packed_sequences_never_see_each_other(small_blocks: None) -> None:
    terms, query, key, value = (draw(dtype=torch.float32)[0], *draw(dtype=torch.float32)[1:])
    segments, alone = segments_of(LENGTHS), segments_of([13])
    place = slice(10, 23)
    chosen = choose_keys(terms, segments, 5)
    mine = IndexTerms(*(each[place] for each in terms))
    assert torch.equal(chosen[place], choose_keys(mine, alone, 5))
    out = sparse_attention(query, key, value, segments, chosen)
    assert torch.equal(out[place], sparse_attention(query[place], key[place], value[place], alone, chosen[place]))
    covered = slice(8, 10)
    assert torch.equal(out[covered], packed_attention(*(each[covered] for each in (query, key, value)), segments_of([2])))
    gradients = torch.autograd.grad(out[place].sum(), (query, key, value))
    outside = [torch.cat((each[:10], each[23:])) for each in gradients]
    assert all(not each.any() for each in outside)


@pytest.mark.shows("sparse attention: equal to dense attention where k covers the sequence")
@pytest.mark.parametrize("top_k", [13, 30])
def test_it_is_dense_where_k_covers_the_sequence(top_k: int) -> None:
    terms, query, key, _ = draw(dtype=torch.float32)
    segments = segments_of(LENGTHS)
    chosen = choose_keys(terms, segments, top_k)
    assert torch.equal(sparse_attention(query, key, key, segments, chosen), packed_attention(query, key, key, segments))


def test_queries_that_are_the_last_of_more_keys_see_what_they_see_of_the_whole(small_blocks: None) -> None:
    """As context parallelism cuts a sequence: the second part of the queries, with the keys up to its end."""
    terms, query, key, value = draw([20])
    chosen = choose_keys(terms, segments_of([20]), 6)
    starts = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 17], dtype=torch.int32)
    part, rows = Segments((5,), (17,), *starts), slice(12, 17)
    mine = IndexTerms(terms.query[rows], terms.key[:17], terms.weight[rows])
    assert torch.equal(choose_keys(mine, part, 6), chosen[rows])
    out = sparse_attention(query[rows], key[:17], value[:17], part, chosen[rows])
    whole = sparse_attention(query, key, value, segments_of([20]), chosen)
    torch.testing.assert_close(out, whole[rows], atol=1e-12, rtol=0)


def test_heads_of_other_ranks_and_queries_count_as_they_should() -> None:
    terms, query, key, _ = draw()
    segments = segments_of(LENGTHS)
    whole = indexer_loss(terms, query, key, segments, None, SCALE)
    shares: list[Tensor] = []
    indexer_loss(
        terms, query[:, 1:], key[:, 1:], segments, None, SCALE, sum_over_ranks=lambda share: shares.append(share.clone())
    )
    of_one = indexer_loss(
        terms, query[:, :1], key[:, :1], segments, None, SCALE, sum_over_ranks=lambda share: share.add_(shares.pop(0))
    )
    torch.testing.assert_close(of_one, whole, atol=1e-11, rtol=0)
    counts = torch.arange(sum(LENGTHS)) < 23
    counted = indexer_loss(terms, query, key, segments, None, SCALE, counts=counts)
    fewer = LENGTHS[:-1]
    without = indexer_loss(IndexTerms(*(each[:23] for each in terms)), query[:23], key[:23], segments_of(fewer), None, SCALE)
    torch.testing.assert_close(counted, without, atol=1e-12, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module_equals_the_formulas_and_lets_nothing_flow_back(interleaved: bool) -> None:
    spec = IndexerSpec(num_heads=INDEX_HEADS, head_dim=10, rotated=6, interleaved=interleaved)
    torch.manual_seed(5)
    module = Indexer(spec, 12, 7).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x, latent = (torch.randn(9, size, dtype=torch.float64, requires_grad=True) for size in (12, 7))
    positions = torch.arange(9)
    terms = module(x, latent, rotary_cos_sin(positions, Rotary(6, 100.0), torch.float64))

    def rotate(whole: Tensor) -> Tensor:
        first = plain_sparse.rotated(whole[..., :6], positions, 100.0, interleaved=interleaved)
        return torch.cat((first, whole[..., 6:]), dim=-1)

    query = rotate((latent @ module.wq_b.weight.T).view(9, INDEX_HEADS, 10))
    key = x @ module.wk.weight.T
    key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    assert module.k_norm.bias is not None
    key = rotate(key * module.k_norm.weight + module.k_norm.bias)
    weight = x @ module.weights_proj.weight.T * INDEX_HEADS**-0.5 * 10**-0.5
    expected = plain_sparse.scores(query, key, weight)
    for t, row in enumerate(index_scores(terms)):
        # Angles are float32.
        torch.testing.assert_close(row[: t + 1], expected[t], atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(sum(each.sum() for each in terms), [x, latent], allow_unused=True)  # type: ignore[arg-type]
    assert gradients == (None, None)
    assert all(each.requires_grad for each in terms)


def test_scores_of_bfloat16_are_float32() -> None:
    terms = draw(dtype=torch.float32)[0]
    rounded = IndexTerms(terms.query.bfloat16(), terms.key.bfloat16(), terms.weight)
    scores = index_scores(rounded)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(
        scores, index_scores(IndexTerms(rounded.query.float(), rounded.key.float(), terms.weight)), atol=0, rtol=0
    )


@pytest.mark.shows("sparse attention: what is kept for the backward pass grows with the length and not with its square")
def test_no_scores_are_kept_for_the_backward_pass() -> None:
    def kept(length: int) -> int:
        terms, query, key, value = draw([length], torch.bfloat16)
        chosen, storages = choose_keys(terms, segments_of([length]), 16), dict[int, int]()

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            sparse_attention(query, key, value, segments_of([length]), chosen)
        return sum(storages.values())

    assert kept(512) == 2 * kept(256)


@pytest.mark.shows("plan: sparse attention is planned with the memory of one block of scores, at 128k tokens in seconds")
def test_a_planned_pass_keeps_no_scores() -> None:
    length, heads, top_k = 2**17, 128, 2048
    on_meta: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.empty(length, heads, size, **on_meta) for size in (24, 24, 16))
    chosen = torch.empty(length, top_k, dtype=torch.int32, device="meta")
    began = time.process_time()
    with LiveBytes([query, key, value, chosen]) as live:
        out = sparse_attention(query, key, value, segments_of([length]), chosen)
        assert live.live < 2 * out.numel() + 1024
        assert live.peak < live.live + 2 * 2 * module._MOST_SCORES
        of_query, of_key, of_value = torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    assert time.process_time() - began < 10
    for gradient, tensor in ((of_query, query), (of_key, key), (of_value, value)):
        assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype
