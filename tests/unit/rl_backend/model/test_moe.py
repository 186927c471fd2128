"""The parts of a mixture of experts: router, balance, dispatch, grouped products, shared experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rl_backend.model.blocks import RouterInput
from rl_backend.model.feedforward.moe import MoE
from rl_backend.primitive.experts import dispatch_on_one_rank
from rl_backend.primitive.grouped_linear import _GroupByGroup, _GroupedMatmul, _has_kernel, grouped_linear
from rl_backend.primitive.router import (
    Router,
    RouterLossCoefficients,
    RouterSettings,
    Routing,
    choose_experts,
    expert_bias_step,
    expert_use,
    expert_weights,
    load_balancing_loss,
    router_z_loss,
)

HIDDEN, EXPERTS, TOKENS = 16, 6, 40


def filled[M: nn.Module](module: M, seed: int = 0) -> M:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


def tokens(count: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def test_softmax_before_or_after_the_choice_normalised_or_not() -> None:
    logits = torch.randn(TOKENS, EXPERTS)
    order = logits.argsort(descending=True)[:, :2]
    everywhere = logits.softmax(-1).gather(1, order)
    among_chosen = logits.gather(1, order).softmax(-1)
    for settings, expected in (
        (RouterSettings(EXPERTS, 2), everywhere),
        (RouterSettings(EXPERTS, 2, normalise=True), everywhere / everywhere.sum(-1, keepdim=True)),
        (RouterSettings(EXPERTS, 2, score_after_top_k=True), among_chosen),
        (RouterSettings(EXPERTS, 2, score_after_top_k=True, scaling_factor=2.5), 2.5 * among_chosen),
    ):
        experts = choose_experts(logits, settings)
        assert torch.equal(experts, order)
        torch.testing.assert_close(expert_weights(logits, experts, settings), expected)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    settings = RouterSettings(EXPERTS, 2, score="sigmoid", expert_bias=True)
    router = filled(Router(HIDDEN, settings))
    assert router.expert_bias is not None and not router.expert_bias.values.requires_grad
    with torch.no_grad():
        router.expert_bias.values.copy_(torch.tensor([0.0, 0.0, 0.0, 10.0, 0.0, 0.0]))
    routing = router(tokens())
    assert bool((routing.experts == 3).any(1).all())
    torch.testing.assert_close(routing.weights, routing.logits.sigmoid().gather(1, routing.experts))


def test_a_choice_from_elsewhere_is_weighted_by_this_router() -> None:
    router = filled(Router(HIDDEN, RouterSettings(EXPERTS, 2, normalise=True)))
    chosen = torch.tensor([[5, 0]] * TOKENS)
    routing = router(tokens(), chosen)
    assert torch.equal(routing.experts, chosen)
    scores = routing.logits.softmax(-1)[:, [5, 0]]
    torch.testing.assert_close(routing.weights, scores / scores.sum(-1, keepdim=True))


def test_a_router_of_bfloat16_weights_computes_in_float32() -> None:
    router = filled(Router(HIDDEN, RouterSettings(EXPERTS, 2))).to(torch.bfloat16)
    x = tokens().detach().bfloat16()
    routing = router(x)
    assert routing.weights.dtype == routing.logits.dtype == torch.float32
    torch.testing.assert_close(routing.logits, x.float() @ router.weight.float().t())


def test_rounded_logits_are_rounded_once() -> None:
    torch.manual_seed(0)
    router = Router(64, RouterSettings(32, 4, bias=True, rounded_logits=True)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(500, 64, dtype=torch.bfloat16)
    assert torch.equal(router(x).logits, torch.nn.functional.linear(x, router.weight, router.bias).float())


@pytest.mark.parametrize("function", [_GroupByGroup, _GroupedMatmul], ids=["group by group", "grouped matmul"])
def test_grouped_products_equal_products_of_each_group_and_empty_groups_have_zero_gradients(function: type) -> None:
    counts = torch.tensor([0, 3, 0, 0, 5, 0])
    x = torch.randn(8, 16, requires_grad=True)
    weight = torch.randn(6, 24, 16, requires_grad=True)
    mix = torch.randn(8, 24)
    (function.apply(x, weight, counts) * mix).sum().backward()
    found = [x.grad, weight.grad]
    x.grad = weight.grad = None
    expected = torch.cat([x[:3] @ weight[1].t(), x[3:] @ weight[4].t()])
    (expected * mix).sum().backward()
    torch.testing.assert_close(found, [x.grad, weight.grad])
    torch.testing.assert_close(function.apply(x, weight, counts), expected)
    assert found[1].shape == weight.shape and not found[1][[0, 2, 3, 5]].any()


def test_frozen_weights_of_groups_get_no_gradient() -> None:
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5, 3)
    grouped_linear(x, weight, torch.tensor([1, 3])).sum().backward()
    assert weight.grad is None and x.grad is not None


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_torchs_grouped_matmul_is_taken_only_where_it_does_not_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    x: Any = SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.bfloat16, element_size=lambda: 2)
    assert _has_kernel(x, torch.empty(2, 8, 16, dtype=torch.bfloat16)) is expected
    assert not _has_kernel(x, torch.empty(2, 8, 15, dtype=torch.bfloat16))


def test_gradients_of_a_mixture_are_those_of_finite_differences() -> None:
    moe = filled(MoE(4, 3, RouterSettings(3, 2, normalise=True), shared_intermediate_size=5, shared_gate=True)).double()
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    names, parameters = zip(*moe.named_parameters(), strict=True)

    def apply(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(moe, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(apply, (x, *parameters))


@pytest.mark.shows("model: routing drops no token, however uneven")
def test_every_copy_reaches_its_expert_and_comes_back() -> None:
    experts = torch.stack([torch.zeros(TOKENS, dtype=torch.int64), torch.full((TOKENS,), 4)], dim=1)
    routing = Routing(experts, torch.rand(TOKENS, 2), torch.zeros(TOKENS, EXPERTS))
    x = tokens()
    sent = dispatch_on_one_rank(x, routing, num_experts=EXPERTS)
    assert sent.counts.tolist() == [TOKENS, 0, 0, 0, TOKENS, 0]
    assert torch.equal(sent.rows, torch.cat([x, x])) and torch.equal(sent.weights, routing.weights.t().flatten())
    torch.testing.assert_close(sent.combine(sent.rows * sent.weights[:, None]), x * routing.weights.sum(1, keepdim=True))


def test_a_shared_expert_with_a_gate_equals_qwen2_moe() -> None:
    config = AutoConfig.for_model(
        "qwen2_moe",
        hidden_size=HIDDEN,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "eager"
    reference = filled(Qwen2MoeSparseMoeBlock(config))
    moe = MoE(HIDDEN, 12, RouterSettings(EXPERTS, 2), shared_intermediate_size=20, shared_gate=True)
    copy_mixture(moe, reference, "shared_expert")
    assert moe.shared_expert_gate is not None
    moe.shared_expert_gate.load_state_dict(reference.shared_expert_gate.state_dict())
    torch.testing.assert_close(moe(tokens()), reference(tokens()[None])[0])


def test_sigmoid_scores_a_bias_scaling_and_a_shared_expert_equal_deepseek_v3() -> None:
    config = AutoConfig.for_model(
        "deepseek_v3",
        hidden_size=HIDDEN,
        moe_intermediate_size=12,
        n_routed_experts=EXPERTS,
        num_local_experts=EXPERTS,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    reference = filled(DeepseekV3MoE(config))
    bias = torch.linspace(-0.5, 0.5, EXPERTS)
    reference.gate.e_score_correction_bias.copy_(bias)
    settings = RouterSettings(EXPERTS, 3, "sigmoid", normalise=True, scaling_factor=2.5, expert_bias=True)
    moe = MoE(HIDDEN, 12, settings, shared_intermediate_size=24)
    copy_mixture(moe, reference, "shared_experts")
    assert moe.gate.expert_bias is not None
    with torch.no_grad():
        moe.gate.expert_bias.values.copy_(bias)
    torch.testing.assert_close(moe(tokens()), reference(tokens()[None])[0])


def copy_mixture(moe: MoE, reference: nn.Module, shared: str) -> None:
    assert moe.shared_expert is not None
    with torch.no_grad():
        moe.gate.weight.copy_(reference.gate.weight)
        moe.experts.gate_up_proj.copy_(reference.experts.gate_up_proj.view_as(moe.experts.gate_up_proj))
        moe.experts.down_proj.copy_(reference.experts.down_proj)
    moe.shared_expert.load_state_dict(reference.get_submodule(shared).state_dict())


def test_the_balancing_loss_is_1_for_even_use_and_that_of_transformers_over_top_k() -> None:
    settings = RouterSettings(4, 1)
    even = Routing(torch.arange(8)[:, None] % 4, torch.ones(8, 1), torch.zeros(8, 4))
    torch.testing.assert_close(load_balancing_loss(even, settings), torch.tensor(1.0))
    one = even._replace(experts=torch.zeros(8, 1, dtype=torch.int64), logits=torch.tensor([[50.0, 0, 0, 0]] * 8))
    torch.testing.assert_close(load_balancing_loss(one, settings), torch.tensor(4.0))
    router = filled(Router(HIDDEN, RouterSettings(EXPERTS, 2)))
    routing = router(tokens())
    theirs = load_balancing_loss_func((routing.logits,), EXPERTS, 2)
    torch.testing.assert_close(2 * load_balancing_loss(routing, router.settings), theirs)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_losses_enter_the_gradients_and_not_the_output(score: str) -> None:
    settings = RouterSettings(EXPERTS, 2, score, normalise=True)  # type: ignore[arg-type]
    coefficients = RouterLossCoefficients(0.3, 0.2)
    plain = filled(MoE(HIDDEN, 12, settings)).double()
    with_losses = filled(MoE(HIDDEN, 12, settings, coefficients=coefficients)).double()
    x, other = (tokens().detach().double().requires_grad_() for _ in range(2))
    output = plain(x)
    routing = plain.route(x)
    losses = 0.3 * load_balancing_loss(routing, settings) + 0.2 * torch.logsumexp(routing.logits, -1).square().mean()
    (output.square().sum() + 0.25 * losses).backward()
    found = with_losses(other, RouterInput(loss_weight=0.25))
    assert torch.equal(found, output)
    found.square().sum().backward()
    torch.testing.assert_close(other.grad, x.grad)
    for ours, expected in zip(with_losses.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_the_z_loss_is_the_mean_square_of_the_log_partition() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    expected = (torch.tensor(2.0).log() ** 2 + (1 + torch.tensor(2.0).log()) ** 2) / 2
    torch.testing.assert_close(router_z_loss(logits), expected)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_padding_does_not_count_in_the_losses(score: str) -> None:
    router = filled(Router(HIDDEN, RouterSettings(EXPERTS, 2, score)))  # type: ignore[arg-type]
    routing, padding = router(tokens()), torch.arange(TOKENS) % 3 == 1
    kept = Routing(*(part[~padding] for part in routing))
    found = load_balancing_loss(routing, router.settings, padding), router_z_loss(routing.logits, padding)
    torch.testing.assert_close(found, (load_balancing_loss(kept, router.settings), router_z_loss(kept.logits)))
    gradients = torch.autograd.grad(sum(found), routing.logits)[0]
    assert not gradients[padding].any() and bool(gradients[~padding].any(1).all())


def test_loss_free_balancing_lowers_the_bias_of_experts_with_more_than_the_mean() -> None:
    counts = expert_use(torch.tensor([[0, 1], [0, 2], [0, 1]]), 4).counts
    assert counts.tolist() == [3, 2, 1, 0]
    torch.testing.assert_close(expert_bias_step(counts, 0.1), torch.tensor([-0.1, -0.1, 0.1, 0.1]))
    # As often as the mean, though a float32 cannot tell.
    many = torch.tensor([2**25 + 1, 2**25, 2**25 + 2])
    torch.testing.assert_close(expert_bias_step(many, 0.1), torch.tensor([0.0, 0.1, -0.1]))


def test_a_mixture_gives_the_same_bits_twice() -> None:
    moe = filled(MoE(HIDDEN, 12, RouterSettings(EXPERTS, 3)))
    gradients = []
    for _ in range(2):
        moe.zero_grad()
        F.silu(moe(tokens())).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in moe.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *gradients))
