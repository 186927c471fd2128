"""The gated delta rule in chunks against the recurrence, token by token: outputs, gradients, states."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.gated_delta import CHUNK, ChunkedDeltaRule, chunks_of, gated_delta_rule, l2_normalised

LENGTHS = (1, 63, 64, 65, 150)
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6


def inputs(seq_lens: Sequence[int], *, decay: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value, decay, beta.

    Args:
        decay: the strongest, as its logarithm.
    """
    generator = torch.Generator().manual_seed(len(seq_lens))

    def random(*shape: int) -> Tensor:
        return torch.randn(sum(seq_lens), *shape, generator=generator, dtype=dtype)

    query, key = (l2_normalised(random(KEY_HEADS, KEY_DIM)) for _ in range(2))
    leaves = [query / KEY_DIM**0.5, key, random(HEADS, VALUE_DIM), -decay * random(HEADS).sigmoid(), random(HEADS).sigmoid()]
    return [leaf.requires_grad_() for leaf in leaves]


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs of one sequence and its last state, by the definition."""
    query, key = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (query, key))
    state = value.new_zeros(HEADS, KEY_DIM, VALUE_DIM) if state is None else state
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        seen = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - seen))
        outputs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outputs), state


def one_by_one(leaves: Sequence[Tensor], seq_lens: Sequence[int]) -> Tensor:
    sequences = zip(*(leaf.split(list(seq_lens)) for leaf in leaves), strict=True)
    return torch.cat([recurrence(*sequence)[0] for sequence in sequences])


@pytest.mark.shows("model: the gated delta rule in chunks equals its recurrence, outputs and gradients, packed or alone")
@pytest.mark.parametrize("seq_lens", [*((length,) for length in LENGTHS), LENGTHS, (150, 1, 1, 64, 129, 2)], ids=str)
@pytest.mark.parametrize("decay", [0.05, 5.0, 200.0])
def test_outputs_and_gradients_are_those_of_the_recurrence(seq_lens: tuple[int, ...], decay: float) -> None:
    leaves = inputs(seq_lens, decay=decay)
    found, expected = gated_delta_rule(*leaves, seq_lens), one_by_one(leaves, seq_lens)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    mix = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    gradients = [torch.autograd.grad((output * mix).sum(), leaves) for output in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-9)


def test_float32_is_as_near_as_its_rounding() -> None:
    leaves = inputs(LENGTHS, dtype=torch.float32)
    exact = one_by_one([leaf.double() for leaf in leaves], LENGTHS)
    torch.testing.assert_close(gated_delta_rule(*leaves, LENGTHS).double(), exact, atol=1e-6, rtol=0)


def test_a_token_that_forgets_costs_no_accuracy_behind_it() -> None:
    """Running sums of its chunk are near -1000 from there on, where float32 has steps of 6e-5."""
    leaves = inputs(LENGTHS, decay=0.05, dtype=torch.float32)
    with torch.no_grad():
        leaves[3][:: CHUNK // 2] = -500.0
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, exact = gated_delta_rule(*leaves, LENGTHS), one_by_one(exact_leaves, LENGTHS)
    torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=0)
    mix = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=exact.dtype)
    gradients = torch.autograd.grad((found * mix).sum(), leaves)
    expected = torch.autograd.grad((exact * mix).sum(), exact_leaves)
    assert all(float((left - right).norm() / right.norm()) < 1e-6 for left, right in zip(gradients, expected, strict=True))


def test_half_precision_is_computed_in_float32() -> None:
    leaves = [leaf.detach().bfloat16() for leaf in inputs(LENGTHS, dtype=torch.float32)]
    found = gated_delta_rule(*leaves, LENGTHS)
    assert found.dtype == torch.float32
    assert torch.equal(found, gated_delta_rule(*(leaf.float() for leaf in leaves), LENGTHS))


@pytest.mark.shows("model: a packed sequence changes no output and no gradient of its neighbours, bit for bit")
def test_nothing_leaks_between_packed_sequences() -> None:
    seq_lens = (65, 30, 150)
    kept = [slice(0, 65), slice(95, 245)]
    runs = []
    for factor in (1.0, 1e6):
        leaves = inputs(seq_lens)
        with torch.no_grad():
            leaves[2][65:95] *= factor
        output = gated_delta_rule(*leaves, seq_lens)
        (own,) = torch.autograd.grad(output[65:95].sum(), leaves[2], retain_graph=True)
        others = torch.autograd.grad(sum(output[rows].sum() for rows in kept), leaves)
        assert own[65:95].any() and not any(own[rows].any() for rows in kept)
        assert all(not gradient[65:95].any() for gradient in others)
        runs.append([tensor[rows] for tensor in (output, *others) for rows in kept])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_a_sequence_that_is_cut_goes_on_from_the_state_before() -> None:
    """As ranks that share sequences compute it."""
    seq_lens = (150, 3, 200)
    leaves = inputs(seq_lens)
    rules, expected = [], []
    cuts = [rows.tensor_split([len(rows) // 2]) for rows in torch.arange(sum(seq_lens)).split(list(seq_lens))]
    for halves in zip(*cuts, strict=True):
        index = torch.cat(halves)
        rules.append(ChunkedDeltaRule(*(leaf[index] for leaf in leaves), [len(half) for half in halves]))
        expected.append(one_by_one(leaves, seq_lens)[index])
    transition = rules[0].transitions()
    states = transition[..., KEY_DIM:]
    torch.testing.assert_close(rules[0].outputs(), expected[0])
    torch.testing.assert_close(rules[1].outputs(states), expected[1])
    # From another state than 0.
    again = rules[1].transitions()
    whole = ChunkedDeltaRule(*leaves, seq_lens).transitions()
    torch.testing.assert_close(again[..., :KEY_DIM] @ states + again[..., KEY_DIM:], whole[..., KEY_DIM:])
    torch.testing.assert_close(again[..., :KEY_DIM] @ transition[..., :KEY_DIM], whole[..., :KEY_DIM])


def test_a_chunk_has_tokens_of_one_sequence() -> None:
    chunks = chunks_of(LENGTHS, torch.device("cpu"))
    assert chunks.steps == (5, 2, 1) and len(set(chunks.places.tolist())) == sum(LENGTHS)
    owners: dict[int, set[int]] = {}
    for sequence, places in enumerate(chunks.places.split(list(LENGTHS))):
        assert places[0] % CHUNK == 0
        for place in places.tolist():
            owners.setdefault(place // CHUNK, set()).add(sequence)
    assert all(len(sequences) == 1 for sequences in owners.values()) and len(owners) == chunks.num_chunks
