"""Adapters beside experts of a frozen mixture, against autograd, and experts whose rows keep their bits beside others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.adapters import AdapterRun, Factors, dropped
from rl_backend.primitive.experts import ClampedExperts, adapted_experts
from rl_backend.primitive.router import Routing

INPUTS, WIDTH, EXPERTS = 12, 10, 3
COUNTS = (5, 0, 7)
NAMES = [[f"experts.{expert}.{name}" for name in ("gate_proj", "up_proj")] for expert in range(EXPERTS)]


def factors(seed: int, rank: int, scale: float) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((rank, INPUTS), (WIDTH, rank)))
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), scale, 0.0, seed)


def test_adapters_of_experts_have_the_outputs_and_gradients_of_autograd() -> None:
    """Two adapters on rows of one expert, one of them on another too, rows of nobody, and a projection that has none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(COUNTS), INPUTS, generator=generator, dtype=torch.float64)
    weight = torch.randn(EXPERTS, 2, WIDTH, INPUTS, generator=generator, dtype=torch.float64)
    first = {NAMES[0][0]: factors(1, 2, 0.5), NAMES[0][1]: factors(2, 3, 2.0), NAMES[2][0]: factors(3, 2, 0.5)}
    second = {NAMES[0][1]: factors(4, 4, 1.5)}
    runs = [(0, AdapterRun(0, 2, first)), (0, AdapterRun(2, 4, second)), (2, AdapterRun(6, 9, first))]
    inputs = x.clone().requires_grad_()
    # Twice: gradients are added up.
    for _ in range(2):
        y = adapted_experts(inputs, weight, torch.tensor(COUNTS), NAMES, runs)
        y.square().sum().backward()

    reference = x.clone().requires_grad_()
    held = [*first.values(), *second.values()]
    leaves = {id(each): (each.a.clone().requires_grad_(), each.b.clone().requires_grad_()) for each in held}
    rows: list[Tensor] = []
    for row in range(len(x)):
        expert = 0 if row < COUNTS[0] else 2
        projections = [weight[expert, place] @ reference[row] for place in range(2)]
        for of_expert, run in runs:
            if of_expert == expert and run.start <= row < run.stop:
                for place, name in enumerate(NAMES[expert]):
                    if name in run.modules:
                        a, b = leaves[id(run.modules[name])]
                        projections[place] = projections[place] + run.modules[name].scale * (b @ (a @ reference[row]))
        rows.append(torch.cat(projections))
    expected = torch.stack(rows)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    assert inputs.grad is not None and reference.grad is not None
    torch.testing.assert_close(inputs.grad, 2 * reference.grad)
    for each in held:
        for found, leaf in zip((each.grad_a, each.grad_b), leaves[id(each)], strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(found, 2 * leaf.grad)


@pytest.mark.parametrize("own", [[1, 0, 0], [2, 1, 3], [0, 5, 1]])
def test_rows_of_clamped_experts_keep_their_bits_beside_others(own: Sequence[int]) -> None:
    """Of sizes for which a product of few rows takes another kernel than one of many."""
    hidden, intermediate = 256, 192
    generator = torch.Generator().manual_seed(0)
    experts = ClampedExperts(EXPERTS, hidden, intermediate).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    experts.beside_adapters = True
    mine = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(own))
    chosen = torch.cat([mine, torch.arange(EXPERTS).repeat(30)])[:, None]
    x, weights = (torch.randn(len(chosen), size, generator=generator) for size in (hidden, 1))

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        inputs = x[rows].clone().requires_grad_()
        out = experts(inputs, Routing(chosen[rows], weights[rows], torch.empty(0)))
        out.square().sum().backward()
        assert inputs.grad is not None
        return out.detach(), inputs.grad

    alone, together = run(slice(0, len(mine))), run(slice(0, len(x)))
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(found[: len(mine)], expected)


def test_adapters_of_experts_drop_what_goes_in_by_their_draws_and_modules() -> None:
    """Two senders' rows of one expert, and rows of another: what is dropped is left out of the change alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(COUNTS), INPUTS, generator=generator, dtype=torch.float64)
    weight = torch.randn(EXPERTS, 2, WIDTH, INPUTS, generator=generator, dtype=torch.float64)
    modules = {NAMES[0][0]: factors(1, 2, 0.5), NAMES[0][1]: factors(2, 3, 2.0), NAMES[2][1]: factors(3, 2, 1.5)}
    modules = {name: each._replace(dropout=0.4) for name, each in modules.items()}
    runs = [
        (0, AdapterRun(0, 2, modules, draw=10)),
        (0, AdapterRun(2, 5, modules, draw=11)),
        (2, AdapterRun(5, 9, modules, draw=10)),
        (2, AdapterRun(9, 12, modules)),
    ]
    inputs, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = adapted_experts(inputs, weight, torch.tensor(COUNTS), NAMES, runs)
    leaves = {name: (each.a.clone().requires_grad_(), each.b.clone().requires_grad_()) for name, each in modules.items()}
    expected = torch.cat([reference[: COUNTS[0]] @ weight[0].flatten(0, 1).t(), reference[5:] @ weight[2].flatten(0, 1).t()])
    for expert, run in runs:
        for place, name in enumerate(NAMES[expert]):
            if name in modules:
                own = reference[run.start : run.stop]
                kept = own * dropped(torch.ones_like(own), run.draw, modules[name])
                change = torch.zeros_like(expected)
                a, b = leaves[name]
                change[run.start : run.stop, place * WIDTH : (place + 1) * WIDTH] = (
                    modules[name].scale * kept @ a.t() @ b.t()
                )
                expected = expected + change
    torch.testing.assert_close(found, expected)
    mix = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (found * mix).sum().backward()
    (expected * mix).sum().backward()
    torch.testing.assert_close(inputs.grad, reference.grad)
    for name, (a, b) in leaves.items():
        torch.testing.assert_close((modules[name].grad_a, modules[name].grad_b), (a.grad, b.grad))
