"""Modules laid out over tensor-parallel ranks compute what one rank does, gradients too, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rl_backend.parallel.shards import local_region, local_tensor
from rl_backend.parallel.tensor import LinearPart, TensorParallel
from rl_backend.primitive.log_prob import next_token_log_probs
from rl_backend.primitive.norm import RMSNorm
from tests.support.rank_threads import run_ranks_with_meshes

TOKENS = 6
"""Of all ranks; each has as many."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(module: nn.Module, whole: Sequence[Tensor]) -> None:
    """Gives each parameter its part of the whole one."""
    for parameter, value in zip(module.parameters(), whole, strict=True):
        with torch.no_grad():
            local_tensor(parameter).copy_(value[local_region(parameter)])


def own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


def gathered(gradient: Any) -> Tensor:
    """The whole gradient of a parameter; a collective."""
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()


def run(ranks: int, build: Callable[[TensorParallel, dist.ProcessGroup], Any]) -> list[Any]:
    def on_rank(group: dist.ProcessGroup) -> Any:
        return build(TensorParallel(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))), group)

    return run_ranks_with_meshes(on_rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_column_and_a_row_are_two_layers_of_one_rank(ranks: int, bias: bool) -> None:
    x, weights = random(TOKENS, 4), [random(6, 4, seed=1), random(6, seed=2), random(5, 6, seed=3), random(5, seed=4)]
    whole = [weight for number, weight in enumerate(weights) if bias or number % 2 == 0]

    def build(tp: TensorParallel, group: dist.ProcessGroup) -> Any:
        up, down = (nn.Linear(*sizes, bias=bias, dtype=torch.float64) for sizes in ((4, 6), (6, 5)))
        tp.column(up)
        tp.row(down)
        tp.gather_input(up)
        part, share = 6 // ranks, group.rank()
        assert up.part == LinearPart((0, 4), (part * share, part * (share + 1)))
        assert down.part == LinearPart((part * share, part * (share + 1)), (0, 5))
        both = nn.Sequential(up, down)
        fill(both, whole)
        mine = own_rows(x, group).detach().clone().requires_grad_()
        hidden = up(mine)
        assert hidden.shape == (TOKENS, part)
        output = down(hidden.tanh())
        # Outside of the forward pass the parameters are whole ones again.
        assert all(isinstance(parameter, DTensor) for parameter in both.parameters())
        (output * own_rows(random(TOKENS, 5, seed=9), group)).sum().backward()
        return output.detach(), mine.grad, [gathered(parameter.grad) for parameter in both.parameters()]

    x.requires_grad_()
    for weight in whole:
        weight.requires_grad_()
    first = whole[: len(whole) // 2]
    plain = nn.functional.linear(nn.functional.linear(x, *first).tanh(), *whole[len(whole) // 2 :])
    (plain * random(TOKENS, 5, seed=9)).sum().backward()
    found = run(ranks, build)
    torch.testing.assert_close(torch.cat([output for output, _, _ in found]), plain.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in found]), x.grad)
    for _, _, gradients in found:
        torch.testing.assert_close(gradients, [weight.grad for weight in whole])


@pytest.mark.parametrize(("ranks", "heads"), [(2, 4), (2, 2), (4, 2), (4, 1)])
def test_fewer_heads_than_ranks_are_copied_and_each_rank_computes_one(ranks: int, heads: int) -> None:
    x, weight, bias = random(4, 3), random(4 * heads, 3, seed=1), random(4 * heads, seed=2)

    def build(tp: TensorParallel, group: dist.ProcessGroup) -> Any:
        linear = nn.Linear(3, 4 * heads, dtype=torch.float64)
        tp.key_or_value(linear, heads)
        fill(linear, [weight, bias])
        output = linear(x)
        output.sum().backward()
        return output.detach(), linear.part, gathered(linear.weight.grad)

    for rank, (output, part, gradient) in enumerate(run(ranks, build)):
        width = 4 * heads // ranks if heads >= ranks else 4
        start = rank * width if heads >= ranks else rank * heads // ranks * 4
        torch.testing.assert_close(output, x @ weight[start : start + width].t() + bias[start : start + width])
        assert part == LinearPart((0, 3), (start, start + width), holds_outputs=heads < ranks)
        # Ranks with a copy of one head each have a part of its gradient.
        torch.testing.assert_close(gradient, x.sum(0).expand(4 * heads, 3) * max(1, ranks // heads))


@pytest.mark.parametrize(("ranks", "heads"), [(2, 4), (4, 2), (2, 1)])
def test_a_norm_over_all_heads_counts_each_head_once(ranks: int, heads: int) -> None:
    x, weight = random(5, 4 * heads), random(4 * heads, seed=1)

    def build(tp: TensorParallel, group: dist.ProcessGroup) -> Any:
        norm = RMSNorm(4 * heads, 1e-6).double()
        tp.norm_over_heads(norm, heads)
        fill(norm, [weight])
        width = max(4, 4 * heads // ranks)
        start = group.rank() * heads // ranks * 4
        return norm(x[:, start : start + width]), slice(start, start + width)

    expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    for output, part in run(ranks, build):
        torch.testing.assert_close(output, expected[:, part], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ranks", "words"), [(2, 7), (3, 4), (1, 5)])
def test_an_embedding_and_a_head_are_those_of_the_whole_vocabulary(ranks: int, words: int) -> None:
    """With three ranks and four words the last has none."""
    tokens, weight = torch.arange(TOKENS) % words, random(words, 4, seed=1)
    labels = (torch.arange(TOKENS) * 2 + 1) % words

    def build(tp: TensorParallel, group: dist.ProcessGroup) -> Any:
        embedding, head = nn.Embedding(words, 4, dtype=torch.float64), nn.Linear(4, words, bias=False, dtype=torch.float64)
        tp.vocabulary(embedding)
        tp.split_rows(head)
        fill(embedding, [weight])
        fill(head, [weight])
        size = -(-words // ranks)
        first, last = min(size * group.rank(), words), min(size * (group.rank() + 1), words)
        assert embedding.part == LinearPart((first, last), (0, 4)) and head.part == LinearPart((0, 4), (first, last))
        hidden = embedding(tokens)
        log_probs = tp.vocabulary_head(words)(hidden, head.weight, labels, temperature=0.5, chunk_tokens=4).log_probs
        # All ranks compute the same; each gives its part of the gradient.
        (log_probs * torch.arange(1.0, TOKENS + 1, dtype=torch.float64)).sum().backward()
        return hidden.detach(), log_probs.detach(), gathered(embedding.weight.grad), gathered(head.weight.grad)

    first, last = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    whole = first[tokens]
    plain = next_token_log_probs(whole, last, labels, temperature=0.5, chunk_tokens=4).log_probs
    (plain * torch.arange(1.0, TOKENS + 1, dtype=torch.float64)).sum().backward()
    found = run(ranks, build)
    torch.testing.assert_close(torch.cat([hidden for hidden, *_ in found]), whole.detach())
    for _, log_probs, of_embedding, of_head in found:
        torch.testing.assert_close(log_probs, plain.detach())
        torch.testing.assert_close((of_embedding, of_head), (first.grad, last.grad))


@pytest.mark.parametrize("partial", [True, False])
def test_what_is_replicated_has_gradients_in_parts_or_whole(partial: bool) -> None:
    x, weight = random(4, 3), random(2, 3, seed=1)

    def build(tp: TensorParallel, group: dist.ProcessGroup) -> Any:
        linear = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        linear.weight.requires_grad_(False)
        tp.replicate(linear, {"weight": lambda weight: 2 * weight}, partial=partial)
        assert not linear.weight.requires_grad
        linear.weight.requires_grad_()
        fill(linear, [weight])
        output = linear(own_rows(x, group) if partial else x)
        output.sum().backward()
        own = nn.Linear(3, 2, dtype=torch.float64)
        tp.replicate_for_own_tokens(own)
        with pytest.raises(RuntimeError):
            linear(torch.zeros(1, 9, dtype=torch.float64))
        assert isinstance(linear.weight, DTensor), "restored after an error"
        return output.detach(), gathered(linear.weight.grad), own.token_share

    found = run(2, build)
    outputs = [output for output, *_ in found]
    torch.testing.assert_close(torch.cat(outputs) if partial else outputs[1], 2 * x @ weight.t())
    for rank, (_, gradient, share) in enumerate(found):
        torch.testing.assert_close(gradient, 2 * x.sum(0).expand(2, 3))
        assert share == (rank, 2)
