"""The module of the short convolution, and what of it is computed, kept and asked for."""

from __future__ import annotations

import pytest
import torch

from rl_backend.primitive.causal_conv import CausalConv, _rows, causal_conv


def test_the_module_starts_from_zeros_and_convolves_with_its_weight() -> None:
    module = CausalConv(2, 3)
    assert module.weight.shape == (2, 1, 3) and not module.weight.any()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[[1.0, 10.0, 100.0]], [[0.0, 0.0, 1.0]]]))
    x = torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [4.0, 8.0]])
    # The last tap is that of the token itself; the second sequence begins at the third token.
    assert module(x, [2, 2]).tolist() == [[100, 5], [210, 6], [300, 7], [430, 8]]
    assert module(x, [4]).tolist() == [[100, 5], [210, 6], [321, 7], [432, 8]]
    before = torch.tensor([[[0.5, 0.0], [0.25, 0.0]], [[0.0, 0.0], [1.0, 9.0]]])
    assert module(x, [2, 2], before)[:, 0].tolist() == [103, 210.25, 310, 431]


@pytest.mark.parametrize("lengths", [(5,), (2, 3)])
@pytest.mark.parametrize(("of_x", "of_weight"), [(True, False), (False, True)])
def test_only_gradients_that_are_asked_for_are_computed(lengths: tuple[int, ...], of_x: bool, of_weight: bool) -> None:
    x, weight = torch.randn(5, 3, requires_grad=of_x), torch.randn(3, 1, 2, requires_grad=of_weight)
    causal_conv(x, weight, lengths).sum().backward()
    assert (x.grad is not None) is of_x and (weight.grad is not None) is of_weight


@pytest.mark.parametrize("lengths", [(5,), (2, 3)])
def test_numbers_are_of_the_dtype_of_the_tokens_whatever_a_weight_and_a_history_are(lengths: tuple[int, ...]) -> None:
    x, weight = torch.randn(5, 3).bfloat16().requires_grad_(), torch.randn(3, 1, 2, requires_grad=True)
    history = torch.randn(len(lengths), 1, 3)
    found = causal_conv(x, weight, lengths, history)
    rounded = causal_conv(x.float(), weight, lengths, history.bfloat16().float())
    assert found.dtype == torch.bfloat16 and torch.equal(found, rounded.bfloat16())
    found.float().square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32


def test_rows_of_sequences_have_room_before_them() -> None:
    rows = _rows((2, 1, 3), 2, torch.device("cpu"))
    assert rows.tokens.tolist() == [2, 3, 6, 9, 10, 11]
    assert rows.before.tolist() == [0, 1, 4, 5, 7, 8] and rows.outputs.tolist() == [0, 1, 4, 7, 8, 9]
