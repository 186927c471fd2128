"""Routers that choose within groups of experts, by scores and a bias."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from rl_backend.contracts import ConfigError
from rl_backend.primitive.router import Router, RouterSettings, choose_experts

TOKENS, HIDDEN = 37, 12


def chosen_one_by_one(scores: list[float], groups: int, chosen_groups: int, top_k: int) -> set[int]:
    """The published rule (arXiv 2412.19437, section 2.1.2), for one token and with lists alone."""
    size = len(scores) // groups
    members = [list(range(group * size, (group + 1) * size)) for group in range(groups)]
    worth = [sum(sorted((scores[expert] for expert in group), reverse=True)[:2]) for group in members]
    best = sorted(range(groups), key=lambda group: -worth[group])[:chosen_groups]
    allowed = [expert for group in best for expert in members[group]]
    return set(sorted(allowed, key=lambda expert: -scores[expert])[:top_k])


@pytest.mark.shows("model: routers choose within groups, by scores and a bias, as DeepSeek-V3, in 30 random shapes")
@pytest.mark.parametrize("seed", range(30))
def test_experts_are_chosen_within_the_groups_with_the_best_pairs(seed: int) -> None:
    rng = random.Random(seed)
    groups, size = rng.choice((2, 3, 4, 5, 8)), rng.randint(2, 7)
    chosen = rng.randint(1, groups)
    settings = RouterSettings(
        groups * size, rng.randint(1, chosen * size), "sigmoid", expert_bias=True, groups=groups, chosen_groups=chosen
    )
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(TOKENS, groups * size, generator=generator, dtype=torch.float64)
    # Negative sums too: what lies outside of the groups must not win with a 0.
    bias = torch.randn(groups * size, generator=generator, dtype=torch.float64) - 1
    found = choose_experts(logits, settings, bias.add)
    for row, scores in zip(found.tolist(), (logits.sigmoid() + bias).tolist(), strict=True):
        assert set(row) == chosen_one_by_one(scores, groups, chosen, settings.top_k)
        assert [scores[expert] for expert in row] == sorted((scores[expert] for expert in row), reverse=True)


def test_routes_and_weights_are_those_of_transformers() -> None:
    config = AutoConfig.for_model(
        "deepseek_v3",
        hidden_size=HIDDEN,
        moe_intermediate_size=8,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    reference = DeepseekV3MoE(config)
    settings = RouterSettings(
        16, 4, "sigmoid", normalise=True, scaling_factor=2.5, expert_bias=True, groups=4, chosen_groups=2
    )
    router = Router(HIDDEN, settings)
    assert router.expert_bias is not None
    with torch.no_grad():
        router.weight.copy_(torch.randn_like(router.weight))
        router.expert_bias.values.copy_(0.5 * torch.randn(16))
        reference.gate.weight.copy_(router.weight)
        reference.gate.e_score_correction_bias.copy_(router.expert_bias.values)
    x = torch.randn(TOKENS, HIDDEN)
    routing = router(x)
    experts, weights = reference.route_tokens_to_experts(reference.gate(x))

    def by_expert(experts: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(TOKENS, 16).scatter(1, experts, weights)

    torch.testing.assert_close(by_expert(routing.experts, routing.weights), by_expert(experts, weights))


@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({"num_experts": 10, "groups": 4}, "groups=4, .* of num_experts=10: groups must be equal"),
        ({"num_experts": 4, "groups": 4}, "groups=4, .* of num_experts=4: groups must"),
        ({"num_experts": 8, "groups": 2, "chosen_groups": 3}, "groups=2, chosen_groups=3 and"),
        ({"num_experts": 8, "groups": 4, "top_k": 3}, "chosen_groups=1 and top_k=3 of"),
    ],
)
def test_groups_that_do_not_fit_are_refused(numbers: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        RouterSettings(**{"top_k": 1, **numbers})
