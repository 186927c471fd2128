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

from rl_backend.contracts import ParallelConfig
from rl_backend.parallel.groups import fake_rank
from rl_backend.parallel.shards import local_region, local_tensor
from rl_backend.parallel.tensor import LinearPart, TensorParallel, distribute_experts, local_parameters
from rl_backend.primitive.adapters import AdapterRun, OwnHead
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


def test_rows_of_all_ranks_are_taken_and_give_back_what_every_rank_made_of_them() -> None:
    x, taken = random(TOKENS, 3), ([5, 0, 2], [2, 2, 4, 1])

    def build(tp: TensorParallel, group: dist.ProcessGroup) -> Any:
        mine = own_rows(x, group).clone().requires_grad_()
        found = tp.take_rows(mine, torch.tensor(taken[group.rank()]))
        (found * (1.0 + group.rank())).sum().backward()
        return found.detach(), mine.grad

    found = run(2, build)
    for (rows, _), wanted in zip(found, taken, strict=True):
        torch.testing.assert_close(rows, x[wanted])
    counts = torch.stack([torch.bincount(torch.tensor(each), minlength=TOKENS) for each in taken]).double()
    expected = (counts[0] + 2 * counts[1])[:, None].expand(TOKENS, 3)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found]), expected)


def test_heads_of_tenants_see_all_tokens_on_every_rank_and_are_trained_by_one() -> None:
    x, others = random(TOKENS, 3), random(TOKENS, seed=1).float()
    heads = [(torch.tensor([[1.0, 2.0, 3.0]]), 0.5), (torch.tensor([[-1.0, 0.0, 2.0]]), -2.0)]

    def build(tp: TensorParallel, group: dist.ProcessGroup) -> Any:
        own = [OwnHead(weight, torch.tensor([bias]), torch.zeros(1, 3), torch.zeros(1)) for weight, bias in heads]
        mine = own_rows(x, group).float().clone().requires_grad_()
        runs = [AdapterRun(0, 2, {}, head=own[0]), AdapterRun(3, 6, {}, head=own[1])]
        values = tp.tenant_heads(mine, others, runs)
        values.sum().backward()
        return values.detach(), mine.grad, [(each.grad_weight, each.grad_bias) for each in own]

    found = run(2, build)
    expected, gradient = others.clone(), torch.zeros(TOKENS, 3)
    for (weight, bias), part in zip(heads, (slice(0, 2), slice(3, 6)), strict=True):
        expected[part] = x[part].float() @ weight[0] + bias
        gradient[part] = weight
    for rank, (values, _, of_heads) in enumerate(found):
        torch.testing.assert_close(values, expected)
        for (of_weight, of_bias), part in zip(of_heads, (slice(0, 2), slice(3, 6)), strict=True):
            torch.testing.assert_close(of_weight[0], x[part].float().sum(0) * (rank == 0))
            assert of_bias.item() == (part.stop - part.start) * (rank == 0)
    torch.testing.assert_close(torch.cat([of_rows for _, of_rows, _ in found]), gradient)


@pytest.mark.parametrize(("sizes", "rank", "first", "part", "counted"), [
    ({"ep": 2}, 0, 0, (0, 6), True),
    ({"ep": 2}, 1, 2, (0, 6), True),
    ({"etp": 2}, 0, 0, (0, 3), True),
    ({"etp": 2}, 1, 0, (3, 6), False),
    ({"ep": 2, "etp": 2}, 3, 2, (3, 6), False),
    ({"ep": 2, "etp": 2}, 2, 2, (0, 3), True),
], ids=str)  # fmt: skip
def test_what_an_expert_adds_itself_is_in_the_sum_of_its_parts_once(
    sizes: dict[str, int], rank: int, first: int, part: tuple[int, int], counted: bool
) -> None:
    """Of four experts with six features inside; a bias of its outputs is no rank's part."""
    experts: Any = nn.Module()
    whole = {"up": torch.arange(4.0 * 6 * 3).view(4, 6, 3), "down": torch.arange(4.0 * 3 * 6).view(4, 3, 6)}
    whole["bias"] = torch.arange(1.0, 4 * 3 + 1).view(4, 3)
    for name, value in whole.items():
        experts.register_parameter(name, nn.Parameter(value))
    experts.intermediate_dims = {"up": 1, "down": 2, "bias": None}
    number = 4 // sizes.get("ep", 1)
    with fake_rank(ParallelConfig(**sizes), rank, sizes.get("ep", 1) * sizes.get("etp", 1)) as groups:
        distribute_experts(experts, groups.ep_mesh)
        fill(experts, list(whole.values()))
        with local_parameters([experts]):
            mine = {name: value[first : first + number] for name, value in whole.items()}
            assert torch.equal(experts.up, mine["up"][:, slice(*part)])
            assert torch.equal(experts.down, mine["down"][:, :, slice(*part)])
            assert torch.equal(experts.bias, mine["bias"] * counted)
        assert all(isinstance(parameter, DTensor) for parameter in experts.parameters())
