"""Experts against a loop over tokens, alone and with adapters; and the way of tokens to them and back."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.primitive.adapters import AdapterRun, Factors, adapters_at_work
from rl_backend.primitive.experts import (
    LIMIT,
    ClampedExperts,
    RowOwners,
    SwiGLUExperts,
    TokenShare,
    copy_rows,
    dispatch_on_one_rank,
    sort_by_expert,
    sum_rows,
    with_owners,
)
from rl_backend.primitive.router import Routing

EXPERTS, HIDDEN, WIDTH, TOKENS = 5, 6, 4, 11


def routing(dtype: torch.dtype) -> Routing:
    """Three different experts a token; none goes to expert 2."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).index_fill_(1, torch.tensor([2]), -1.0).topk(3).indices
    weights = torch.rand(TOKENS, 3, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return Routing(chosen, weights.requires_grad_(), torch.empty(0))


def filled(experts: torch.nn.Module, dtype: torch.dtype, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(0)
    experts.to(dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def swiglu(experts: SwiGLUExperts, expert: int, row: Tensor) -> Tensor:
    gate, up = (experts.gate_up_proj[expert, place].double() @ row for place in range(2))
    return experts.down_proj[expert].double() @ (F.silu(gate) * up)


def clamped(experts: ClampedExperts, expert: int, row: Tensor) -> Tensor:
    both = row @ experts.gate_up_proj[expert].double() + experts.gate_up_proj_bias[expert].double()
    gate, up = both[0::2].clamp(max=LIMIT), both[1::2].clamp(-LIMIT, LIMIT)
    hidden = (up + 1.0) * gate * torch.sigmoid(1.702 * gate)
    return hidden @ experts.down_proj[expert].double() + experts.down_proj_bias[expert].double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("kind", [SwiGLUExperts, ClampedExperts])
def test_outputs_and_gradients_are_those_of_one_token_after_the_other(
    kind: type[SwiGLUExperts | ClampedExperts], dtype: torch.dtype, tolerance: float
) -> None:
    experts = kind(EXPERTS, HIDDEN, WIDTH)
    filled(experts, dtype, 2.0 if kind is ClampedExperts else 0.7)
    routes, x = routing(dtype), torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    mix = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    inputs = x.clone().requires_grad_()
    found = experts(inputs, routes)
    assert found.dtype == dtype
    leaves = (inputs, routes.weights, *experts.parameters())
    gradients = torch.autograd.grad((found * mix).sum(), leaves)
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in leaves]
    one = swiglu if kind is SwiGLUExperts else clamped
    wide, whole = inputs.double(), cast(Any, one)
    expected = torch.stack(
        [
            sum(
                (weight.double() * whole(experts, int(expert), row) for expert, weight in zip(*both, strict=True)),
                start=row.new_zeros(()),
            )
            for row, both in zip(wide, zip(routes.experts, routes.weights, strict=True), strict=True)
        ]
    )
    right = torch.autograd.grad((expected * mix.double()).sum(), leaves)
    for mine, other in zip((found, *gradients), (expected, *right), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), atol=tolerance * float(other.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("frozen", ["gate_up_proj_bias", "down_proj_bias"])
def test_frozen_biases_of_clamped_experts_get_no_gradient_and_the_rest_do(frozen: str) -> None:
    experts = ClampedExperts(EXPERTS, HIDDEN, WIDTH)
    filled(experts, torch.float32)
    experts.get_parameter(frozen).requires_grad_(False)
    experts(torch.randn(TOKENS, HIDDEN), routing(torch.float32)).sum().backward()
    assert [name for name, parameter in experts.named_parameters() if parameter.grad is None] == [frozen]


def test_a_module_says_its_sizes() -> None:
    assert "5 experts, hidden_size=6, intermediate_size=4" in repr(SwiGLUExperts(EXPERTS, HIDDEN, WIDTH))
    assert "5 experts, hidden_size=6, intermediate_size=4" in repr(ClampedExperts(EXPERTS, HIDDEN, WIDTH))
    assert SwiGLUExperts(EXPERTS, HIDDEN, WIDTH).gate_up_proj.shape == (EXPERTS, 2, WIDTH, HIDDEN)
    assert ClampedExperts(EXPERTS, HIDDEN, WIDTH).gate_up_proj.shape == (EXPERTS, HIDDEN, 2 * WIDTH)


def factors(seed: int, inputs: int, outputs: int, scale: float) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, inputs), (outputs, 2)))
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), scale, 0.0, seed)


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_of_each_adapter_go_through_its_own_experts(rank: int) -> None:
    """Rank 1 of two has the second half of the tokens."""
    experts = SwiGLUExperts(EXPERTS, HIDDEN, WIDTH)
    filled(experts, torch.float64)
    experts.requires_grad_(False)
    experts.names = [[f"{expert}.{name}" for name in ("gate", "up", "down")] for expert in range(EXPERTS)]
    experts.share = TokenShare(rank)
    sizes = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    of_experts = {
        key: {
            name: factors(100 * key + place, *sizes[name.partition(".")[2]], scale=0.3 * key)
            for place, name in enumerate(name for each in experts.names for name in each)
            if (place + key) % 3
        }
        for key in (1, 2)
    }
    runs = [
        AdapterRun(3, 9, {}, key=2, of_experts=of_experts),
        AdapterRun(9, 14, {}, key=1, of_experts=of_experts),
        AdapterRun(16, 22, {}, key=3, of_experts=of_experts),
    ]
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    routes, inputs = routing(torch.float64), x.clone().requires_grad_()
    with adapters_at_work(runs):
        found = experts(inputs, routes)
    found.square().sum().backward()
    held = [each for modules in of_experts.values() for each in modules.values()]
    leaves = {id(each): (each.a.clone().requires_grad_(), each.b.clone().requires_grad_()) for each in held}
    reference, outputs = x.clone().requires_grad_(), []
    for token in range(TOKENS):
        place = rank * TOKENS + token
        key = 2 if 3 <= place < 9 else 1 if 9 <= place < 14 else 0
        output = reference.new_zeros(HIDDEN)
        for expert, weight in zip(routes.experts[token].tolist(), routes.weights[token].detach(), strict=True):

            def linear(row: Tensor, matrix: Tensor, name: str, expert: int = expert, key: int = key) -> Tensor:
                mine = of_experts.get(key, {}).get(f"{expert}.{name}")
                if mine is None:
                    return matrix @ row
                a, b = leaves[id(mine)]
                return matrix @ row + mine.scale * (b @ (a @ row))

            gate = linear(reference[token], experts.gate_up_proj[expert, 0], "gate")
            up = linear(reference[token], experts.gate_up_proj[expert, 1], "up")
            output = output + weight * linear(F.silu(gate) * up, experts.down_proj[expert], "down")
        outputs.append(output)
    expected = torch.stack(outputs)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(inputs.grad, reference.grad)
    for each in held:
        for mine, leaf in zip((each.grad_a, each.grad_b), leaves[id(each)], strict=True):
            torch.testing.assert_close(mine, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)


def test_names_count_from_the_first_expert_of_a_rank() -> None:
    """A rank with the last two of five experts; its tokens all go there."""
    experts = SwiGLUExperts(2, HIDDEN, WIDTH)
    filled(experts, torch.float64)
    experts.requires_grad_(False)
    experts.names = [[f"{expert}.{name}" for name in ("gate", "up", "down")] for expert in range(EXPERTS)]
    experts.first_expert = 3
    mine = factors(1, HIDDEN, WIDTH, 1.0)
    run = AdapterRun(0, TOKENS, {}, key=0, of_experts={0: {"4.up": mine}})
    routes = Routing(torch.arange(TOKENS)[:, None] % 2, torch.ones(TOKENS, 1, dtype=torch.float64), torch.empty(0))
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    with adapters_at_work([run]):
        found = experts(x, routes)
    experts.gate_up_proj[1, 1] += mine.b @ mine.a
    expected = torch.stack([swiglu(experts, token % 2, row) for token, row in enumerate(x)])
    torch.testing.assert_close(found, expected)


def test_choices_are_ordered_by_expert_then_owner_then_token() -> None:
    chosen = torch.tensor([[3, 0], [0, 2], [3, 2]])
    order = sort_by_expert(chosen, 5)
    assert order.choices.tolist() == [1, 2, 3, 5, 0, 4] and order.tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert order.places.tolist() == [[4, 0], [1, 2], [5, 3]] and order.counts.tolist() == [2, 0, 2, 2, 0]
    assert with_owners(chosen, 5, None) == (chosen, 5)
    owners = RowOwners(torch.tensor([1, 0, 2]), [7, 9], [{}, {}], [-1, -1])
    numbers, kinds = with_owners(chosen, 5, owners)
    assert numbers.tolist() == [[10, 1], [0, 6], [11, 8]] and kinds == 15
    x = torch.arange(3.0)[:, None]
    sent = dispatch_on_one_rank(x, Routing(chosen, torch.arange(6.0).view(3, 2), x), owners, num_experts=5)
    assert sent.rows[:, 0].tolist() == [1, 0, 1, 2, 0, 2] and sent.weights.tolist() == [2, 1, 3, 5, 0, 4]
    assert sent.counts.tolist() == [2, 0, 2, 2, 0]
    assert [(expert, run.start, run.stop) for expert, run in sent.adapters] == [
        (0, 0, 1),
        (0, 1, 2),
        (2, 2, 3),
        (3, 4, 5),
    ]
    assert sent.combine(sent.rows)[:, 0].tolist() == [0, 2, 4]
    assert dispatch_on_one_rank(x, Routing(chosen, torch.ones(3, 2), x), num_experts=5).adapters == ()


@pytest.mark.parametrize("top_k", [1, 3])
def test_copies_and_their_sums_undo_each_other_and_are_each_others_gradients(top_k: int) -> None:
    order = sort_by_expert(torch.rand(7, 4, generator=torch.Generator().manual_seed(0)).topk(top_k).indices, 4)
    x = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(7 * top_k, 2, 3, dtype=torch.float64, requires_grad=True)
    copies = copy_rows(x, order.tokens, order.places)
    assert torch.equal(copies, x[order.tokens])
    torch.testing.assert_close(sum_rows(copies, order.tokens, order.places), top_k * x)
    torch.testing.assert_close(
        sum_rows(rows, order.tokens, order.places), torch.zeros_like(x).index_add(0, order.tokens, rows)
    )
    for function, leaf in ((copy_rows, x), (sum_rows, rows)):
        assert torch.autograd.gradcheck(partial(function, tokens=order.tokens, places=order.places), (leaf,))
