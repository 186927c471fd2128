"""The router: its logits, its choice and its weights, by definition, and choices from elsewhere for some tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_backend.contracts import ConfigError
from rl_backend.primitive.router import ExpertBias, Router, RouterSettings, choose_experts, expert_weights

TOKENS, HIDDEN, EXPERTS = 9, 6, 5


def router_of(dtype: torch.dtype = torch.float64, **settings: Any) -> Router:
    router = Router(HIDDEN, RouterSettings(EXPERTS, 2, **settings)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return router


def tokens(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_are_scores_of_the_chosen_normalised_and_scaled(
    score: Any, normalise: bool, after: bool, bias: bool
) -> None:
    router = router_of(score=score, normalise=normalise, score_after_top_k=after, bias=bias, scaling_factor=1.5)
    x = tokens().requires_grad_()
    routing = router(x)
    added: Any = router.bias if bias else 0.0
    logits = x @ router.weight.t() + added
    assert (router.bias is not None) is bias and router.expert_bias is None
    torch.testing.assert_close(routing.logits, logits)
    chosen = logits.topk(2).indices
    assert torch.equal(routing.experts, chosen) and routing.experts.dtype == torch.int64
    if score == "sigmoid":
        weights = logits.sigmoid().gather(1, chosen)
    else:
        weights = logits.gather(1, chosen).softmax(-1) if after else logits.softmax(-1).gather(1, chosen)
    weights = 1.5 * (weights / weights.sum(-1, keepdim=True) if normalise else weights)
    torch.testing.assert_close(routing.weights, weights)
    leaves = (x, *router.parameters())
    mix = torch.rand(TOKENS, 2, dtype=torch.float64)
    found, expected = (torch.autograd.grad((each * mix).sum(), leaves) for each in (routing.weights, weights))
    torch.testing.assert_close(found, expected)


def test_rows_of_minus_one_are_chosen_here_and_expert_0_is_an_expert() -> None:
    router = router_of(score="sigmoid", expert_bias=True)
    x, own = tokens(), router(tokens())
    given = torch.full((TOKENS, 2), -1, dtype=torch.int32)
    given[2], given[5] = torch.tensor([0, 4]), torch.tensor([3, 0])
    before = given.clone()
    routing = router(x, given)
    expected = own.experts.clone()
    expected[2], expected[5] = torch.tensor([0, 4]), torch.tensor([3, 0])
    assert torch.equal(routing.experts, expected) and torch.equal(given, before)
    torch.testing.assert_close(routing.weights, own.logits.sigmoid().gather(1, expected))


@pytest.mark.parametrize(("rounded", "exact"), [(False, True), (True, False)])
def test_logits_of_bfloat16_are_rounded_only_where_the_settings_say(rounded: bool, exact: bool) -> None:
    router, x = router_of(torch.bfloat16, rounded_logits=rounded, bias=True), tokens(torch.bfloat16)
    routing = router(x)
    assert router.bias is not None
    wide = x.float() @ router.weight.float().t() + router.bias.float()
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    assert torch.equal(routing.logits, routing.logits.bfloat16().float()) is rounded
    torch.testing.assert_close(routing.logits, wide, atol=1e-5 if exact else 0.05, rtol=0)


def test_a_bias_of_the_choice_is_added_in_float32_and_is_not_trained() -> None:
    bias = ExpertBias(3)
    assert not bias.values.requires_grad and bias.values.tolist() == [0.0] * 3
    with torch.no_grad():
        bias.values.copy_(torch.tensor([0.001, -1.0, 2.0]))
    scores = torch.tensor([[0.5, 0.25, 0.125]])
    torch.testing.assert_close(bias(scores), torch.tensor([[0.501, -0.75, 2.125]]))
    assert bias(scores.double()).dtype == torch.float64


def test_a_choice_by_logits_after_the_top_k_and_ties_of_scores() -> None:
    """Scores of float32 that are equal though their logits differ are broken as others break them."""
    logits = torch.tensor([[100.0, 30.0, 90.0, -5.0]])
    assert choose_experts(logits, RouterSettings(4, 3, score_after_top_k=True)).tolist() == [[0, 2, 1]]
    saturated = torch.tensor([[40.0, 50.0, 60.0, -1.0]])
    scores = saturated.sigmoid()
    assert scores[0, 0] == scores[0, 2]
    expected = scores.topk(2).indices
    assert torch.equal(choose_experts(saturated, RouterSettings(4, 2, "sigmoid")), expected)


def test_no_sum_of_scores_is_divided_by_0() -> None:
    settings = RouterSettings(3, 2, "sigmoid", normalise=True)
    weights = expert_weights(torch.full((1, 3), -200.0), torch.tensor([[0, 1]]), settings)
    assert weights.tolist() == [[0.0, 0.0]]


def test_choices_among_all_groups_are_choices_among_all_experts() -> None:
    logits = torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(0))
    all_groups = RouterSettings(6, 4, groups=3, chosen_groups=3)
    assert torch.equal(choose_experts(logits, all_groups), logits.softmax(-1).topk(4).indices)
    # The best pair, and not the best expert, makes the best group.
    one = torch.tensor([[9.0, 0.0, 5.0, 6.0, 8.0, 2.0]])
    assert choose_experts(one, RouterSettings(6, 2, groups=3, score_after_top_k=True)).tolist() == [[3, 2]]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"chosen_groups": 0}, "groups=1, chosen_groups=0 and"),
        ({"num_experts": 8, "top_k": 9}, "top_k=9 of num_experts=8"),
        ({"num_experts": 6, "groups": 6}, "groups=6, .* of num_experts=6"),
    ],
)
def test_settings_that_do_not_fit_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**dict[str, Any]({"num_experts": 4, "top_k": 1, **numbers}))
    RouterSettings(1, 1)
    RouterSettings(8, 4, groups=4, chosen_groups=2)


def test_a_router_says_what_it_is() -> None:
    assert "num_experts=5, top_k=2" in repr(router_of())
