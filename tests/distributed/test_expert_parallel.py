"""Experts on several ranks: what tokens get, every gradient, and the routers' losses equal those of one rank."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_backend.model.blocks import RouterInput
from rl_backend.model.feedforward.moe import MoE
from rl_backend.parallel.collectives import all_to_all_rows
from rl_backend.parallel.expert import AllToAllDispatcher
from rl_backend.primitive.experts import SwiGLUExperts
from rl_backend.primitive.router import RouterLossCoefficients, RouterSettings
from tests.support.rank_pool import RankPool

HIDDEN, INTERMEDIATE, EXPERTS = 8, 12, 8
LAYOUTS = [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
TOKENS = {
    "different numbers": (7, 13, 4, 9),
    "ranks without tokens": (0, 11, 0, 5),
    "one token": (0, 1, 0, 0),
}


class Case(NamedTuple):
    """What every rank of a test computes on; ``skewed`` sends all tokens to two experts, ``top_k`` of 1 to one."""

    tokens: tuple[int, ...]
    top_k: int = 3
    skewed: bool = False
    checkpointed: bool = False


CASES = {
    **{name: Case(numbers) for name, numbers in TOKENS.items()},
    "all tokens to one expert": Case((5, 6, 0, 3), top_k=1, skewed=True),
    "computed again in the backward pass": Case((5, 6, 2, 3), checkpointed=True),
}


def make_moe(case: Case) -> MoE:
    """A mixture whose every parameter the seed fixes; float64."""
    generator = torch.Generator().manual_seed(0)
    moe = MoE(HIDDEN, INTERMEDIATE, RouterSettings(EXPERTS, case.top_k, normalise=case.top_k > 1)).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        if case.skewed:
            moe.gate.weight[:] = 1e-3 * moe.gate.weight
            moe.gate.weight[5] = 1.0
    return moe


def make_tokens(case: Case, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of each rank, positive so that the skewed router prefers one expert, and what their outputs are mixed with."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(count, HIDDEN) for count in case.tokens[:ranks]]
    tokens = [torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1 for shape in shapes]
    if not case.skewed:
        tokens = [3 * (x - 0.6) for x in tokens]
    return tokens, [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def part_of(moe: MoE, index: int, ep_size: int, etp_size: int) -> SwiGLUExperts:
    """The experts that rank ``index`` of the group has."""
    ep, etp = divmod(index, etp_size)
    gate_up = moe.experts.gate_up_proj.chunk(ep_size)[ep].chunk(etp_size, dim=2)[etp]
    down = moe.experts.down_proj.chunk(ep_size)[ep].chunk(etp_size, dim=2)[etp]
    experts = SwiGLUExperts(EXPERTS // ep_size, HIDDEN, INTERMEDIATE // etp_size)
    experts.gate_up_proj = nn.Parameter(gate_up.detach().clone())
    experts.down_proj = nn.Parameter(down.detach().clone())
    return experts


def results(moe: MoE, x: Tensor, mix: Tensor, checkpointed: bool = False) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward."""
    x = x.clone().requires_grad_()
    output = checkpoint(moe, x, use_reentrant=False) if checkpointed else moe(x)
    (output * mix).sum().backward()
    gradients = {name: parameter.grad for name, parameter in moe.named_parameters()}
    return {"output": output.detach(), "x": x.grad, **gradients}


def mixture_job(ep_size: int, etp_size: int, case: Case) -> dict[str, Tensor]:
    """Results on this rank's tokens and part of the experts; the router's gradient summed over the ranks."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    moe = make_moe(case)
    moe.experts = part_of(moe, rank, ep_size, etp_size)
    moe.experts.dispatch = AllToAllDispatcher(group, EXPERTS, ep_size, etp_size)
    tokens, mixes = make_tokens(case, dist.get_world_size())
    found = results(moe, tokens[rank], mixes[rank], case.checkpointed)
    again = make_moe(case)
    again.experts = part_of(again, rank, ep_size, etp_size)
    again.experts.dispatch = moe.experts.dispatch
    assert all(map(torch.equal, found.values(), results(again, tokens[rank], mixes[rank]).values()))
    dist.all_reduce(found["gate.weight"])
    return found


@pytest.mark.shows(
    "parallel: experts on 2 and 4 ranks (ep, etp, both) give one rank's outputs and gradients, router's included"
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("ep_size", "etp_size"), LAYOUTS, ids=lambda size: str(size))
def test_experts_on_several_ranks_give_what_one_rank_gives(ranks: RankPool, ep_size: int, etp_size: int, case: Case) -> None:
    world_size = ep_size * etp_size
    tokens, mixes = make_tokens(case, world_size)
    moe = make_moe(case)
    expected = results(moe, torch.cat(tokens), torch.cat(mixes))
    if sum(case.tokens[:world_size]) > 1:
        assert expected["gate.weight"].abs().max() > 1e-3
    parts = ranks.run(mixture_job, ep_size, etp_size, case, world_size=world_size)
    for name in ("output", "x"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected[name], rtol=1e-10, atol=1e-12)
    for index, part in enumerate(parts):
        ep, etp = divmod(index, etp_size)
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            wanted = expected[name].chunk(ep_size)[ep].chunk(etp_size, dim=2)[etp]
            torch.testing.assert_close(part[name], wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(part["gate.weight"], expected["gate.weight"], rtol=1e-10, atol=1e-12)


PADDED = ((6, 0), (6, 2), (6, 6), (6, 5))
"""Rows of each rank, and how many of the last of them are padding: on one of them, all."""


def loss_moe() -> MoE:
    moe = make_moe(Case((0,)))
    moe.coefficients = RouterLossCoefficients(load_balancing=0.3, z=0.2)
    return moe


def padded_tokens(ranks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Rows, what outputs are mixed with (0 for padding) and padding of each rank."""
    tokens, mixes = make_tokens(Case(tuple(rows for rows, _ in PADDED)), ranks)
    paddings = [torch.arange(rows) >= rows - padded for rows, padded in PADDED[:ranks]]
    return tokens, [mix.masked_fill(padding[:, None], 0.0) for mix, padding in zip(mixes, paddings, strict=True)], paddings


def loss_job() -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    tokens, mixes, paddings = padded_tokens(dist.get_world_size())
    moe = loss_moe()
    moe.sum_over_ranks = dist.all_reduce
    x = tokens[rank].requires_grad_()
    padding = paddings[rank] if paddings[rank].any() else None
    (checkpoint(moe, x, RouterInput(0.5, padding), use_reentrant=False) * mixes[rank]).sum().backward()
    assert x.grad is not None and moe.gate.weight.grad is not None
    dist.all_reduce(moe.gate.weight.grad)
    return x.grad, moe.gate.weight.grad


@pytest.mark.shows("parallel: router losses do not depend on how tokens and padding are spread over 2 and 4 ranks")
@pytest.mark.parametrize("world_size", [2, 4])
def test_router_losses_are_those_of_all_tokens_and_of_no_padding(ranks: RankPool, world_size: int) -> None:
    tokens, mixes, paddings = padded_tokens(world_size)
    kept = ~torch.cat(paddings)
    moe, x = loss_moe(), torch.cat(tokens)[kept].requires_grad_()
    (moe(x, RouterInput(0.5)) * torch.cat(mixes)[kept]).sum().backward()
    found = ranks.run(loss_job, world_size=world_size)
    of_tokens = torch.cat([gradient for gradient, _ in found])
    torch.testing.assert_close(of_tokens[kept], x.grad, rtol=1e-10, atol=1e-12)
    assert not of_tokens[~kept].any()
    for _, of_router in found:
        torch.testing.assert_close(of_router, moe.gate.weight.grad, rtol=1e-10, atol=1e-12)


def rows_job(dtype: torch.dtype) -> tuple[list[list[float]], list[list[float]]]:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    sent = {0: [1, 2], 1: [0, 3]}[rank]
    received = {0: [1, 0], 1: [2, 3]}[rank]
    x = torch.tensor([[10.0 * rank + index] for index in range(sum(sent))], dtype=dtype, requires_grad=True)
    out = all_to_all_rows(x, sent, received, group)
    (out * (rank + 1)).sum().backward()
    assert x.grad is not None
    return out.tolist(), x.grad.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_the_ranks_they_are_for_and_their_gradients_come_back(ranks: RankPool, dtype: torch.dtype) -> None:
    first, second = ranks.run(rows_job, dtype)
    assert first == ([[0.0]], [[1.0], [2.0], [2.0]])
    assert second == ([[1.0], [2.0], [10.0], [11.0], [12.0]], [[2.0], [2.0], [2.0]])
