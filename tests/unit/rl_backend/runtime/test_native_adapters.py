"""Adapters beside the layers of a native model, on the rows that a rank has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rl_backend.primitive.adapter_runs import AdapterRun, Factors, adapters_at_work
from rl_backend.runtime.native.adapters import _forward

NAME, ROWS, INPUTS, OUTPUTS = "model.layers.0.mlp.shared_expert_gate", 24, 6, 4


def factors(seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(3, INPUTS, generator=generator), torch.randn(OUTPUTS, 3, generator=generator)
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), 0.5 + seed, 0.0, seed)


@pytest.mark.parametrize("ranks", [None, 1, 2, 3])
def test_a_rank_that_has_a_share_of_the_tokens_adapts_each_with_its_own_tenants_factors(ranks: int | None) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS)
    owners = {(0, 5): factors(1), (5, 15): factors(2), (18, 24): factors(3)}
    runs = [AdapterRun(*rows, {NAME: each}) for rows, each in owners.items()]
    expected = layer(x).detach()
    for (start, stop), each in owners.items():
        expected[start:stop] += each.scale * x[start:stop] @ each.a.t() @ each.b.t()
    found: list[Tensor] = []
    for rank in range(ranks or 1):
        if ranks is not None:
            setattr(layer, "token_share", (rank, ranks))  # noqa: B010 - as LinearPart's owner sets it
        with adapters_at_work(runs):
            found.append(_forward(layer, NAME, x.chunk(ranks or 1)[rank].requires_grad_()))
    torch.testing.assert_close(torch.cat(found), expected)
    torch.cat(found).sum().backward()
    for (start, stop), each in owners.items():
        # Of the sum: b is moved by what a makes of the inputs, the same for all outputs.
        of_b = (each.scale * x[start:stop] @ each.a.t()).sum(0).expand(OUTPUTS, 3)
        torch.testing.assert_close(each.grad_b, of_b, rtol=1e-4, atol=1e-5)
