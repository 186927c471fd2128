"""Attention in compiled code against the same in eager code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.attention import Segments, has_operator, packed_attention
from tests.support.random_trees import random_tree

LENGTHS = (1, 64, 65, 3, 3, 130, 2)
WHOLE = Segments.of_sequences(torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), LENGTHS)
TREE = Segments.of_tree(random_tree(3))
BOTH = pytest.mark.parametrize("segments", [WHOLE, TREE], ids=["sequences", "tree"])


def inputs(segments: Segments, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values of another width, and sinks."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(segments.query_lens)
    shapes = [(rows, 4, 8), (rows, 2, 8), (rows, 2, 6), (4,)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("with_sinks", [False, True])
@BOTH
def test_compiled_code_attends_with_the_same_bits_forward_and_backward(segments: Segments, with_sinks: bool) -> None:
    found = []
    # Tests with vLLM, in the same process, may have said otherwise.
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(packed_attention, fullgraph=True, backend="aot_eager")
        for attend, given in ((compiled, segments.hidden()), (packed_attention, segments)):
            *qkv, sinks = inputs(segments)
            out = attend(*qkv, given, None, sinks if with_sinks else None)
            mix = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
            wanted = [*qkv, sinks] if with_sinks else qkv
            found.append((out, *torch.autograd.grad((out * mix).sum(), wanted)))
    for in_compiled, in_eager in zip(*found, strict=True):
        assert torch.equal(in_compiled, in_eager)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@BOTH
def test_torch_finds_the_operations_as_they_are_declared(segments: Segments, dtype: str) -> None:
    query, key, value, sinks = (each.detach() for each in inputs(segments, getattr(torch, dtype)))
    described = segments.cu_queries, segments.cu_keys, sinks, segments.tree is not None
    out, log_sums = torch.ops.rl_backend.cpu_attention(query, key, value, *described)
    for operation, given in (
        (torch.ops.rl_backend.cpu_attention, (query, key, value)),
        (torch.ops.rl_backend.cpu_attention_backward, (out, query, key, value, out, log_sums)),
    ):
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(operation.default, (*given, *described), test_utils=tests)


def test_what_compiled_code_can_hold_is_known() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert has_operator(cpu, torch.float32, None, sinks=True)
    assert has_operator(cuda, torch.bfloat16, 16, sinks=False)
    assert not has_operator(cpu, torch.float32, 16, sinks=False)
    assert has_operator(cpu, torch.bfloat16, None, sinks=False)
    assert not has_operator(cuda, torch.float32, None, sinks=False)
    assert not has_operator(cuda, torch.bfloat16, None, sinks=True)
