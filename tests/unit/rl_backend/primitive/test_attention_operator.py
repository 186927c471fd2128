"""The operator of packed attention against the function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.attention_operator import compiled_attention, has_operator
from tests.support.random_trees import random_tree

LENGTHS = (1, 64, 65, 3, 3, 130, 2)
WHOLE = Segments.of_sequences(torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), LENGTHS)
TREE = Segments.of_tree(random_tree(3))


def inputs(segments: Segments, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values of another width, and sinks."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(segments.query_lens)
    shapes = [(rows, 4, 8), (rows, 2, 8), (rows, 2, 6), (4,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("segments", [WHOLE, TREE], ids=["sequences", "tree"])
def test_the_operator_has_the_bits_of_the_function_forward_and_backward(segments: Segments, with_sinks: bool) -> None:
    found = []
    for attend, given in ((compiled_attention, segments.hidden()), (packed_attention, segments)):
        *qkv, sinks = inputs(segments)
        out = attend(*qkv, given, None, sinks if with_sinks else None)
        mix = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        wanted = [*qkv, sinks] if with_sinks else qkv
        found.append((out, *torch.autograd.grad((out * mix).sum(), wanted)))
    for operator, function in zip(*found, strict=True):
        assert torch.equal(operator, function)


@pytest.mark.parametrize("segments", [WHOLE, TREE], ids=["sequences", "tree"])
def test_torch_finds_the_operator_as_it_is_declared(segments: Segments) -> None:
    hidden = segments.hidden()
    torch.library.opcheck(
        torch.ops.rl_backend.cpu_attention.default,
        (*inputs(segments)[:3], hidden.edges, inputs(segments)[3]),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_what_has_no_operator_is_known() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert has_operator(cpu, torch.float32, None, sinks=True)
    assert has_operator(cuda, torch.bfloat16, 16, sinks=False)
    assert not has_operator(cpu, torch.float32, 16, sinks=False)
    assert has_operator(cpu, torch.bfloat16, None, sinks=False)
    assert not has_operator(cuda, torch.float32, None, sinks=False)
    assert not has_operator(cuda, torch.bfloat16, None, sinks=True)
