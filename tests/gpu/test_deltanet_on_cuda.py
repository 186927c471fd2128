"""Gated DeltaNet on CUDA: as on a CPU, the same bits twice, the kernels of flash-linear-attention, training in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.gated_delta import fla_gated_delta_rule, gated_delta_rule, has_fla, l2_normalised
from tests.gpu.conftest import MakeRuntime
from tests.support.native import micro_batches, token_loss
from tests.support.qwen3_5 import write_qwen3_5

pytestmark = pytest.mark.gpu
LENGTHS = (1, 64, 65, 500)


def inputs() -> list[Tensor]:
    """Query, key, value, decay, beta, on the CPU."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query, key = (l2_normalised(torch.randn(tokens, 2, 64)) for _ in range(2))
    return [query / 8.0, key, torch.randn(tokens, 4, 64), -torch.rand(tokens, 4), torch.rand(tokens, 4)]


def with_gradients(leaves: list[Tensor], parents: tuple[int, ...] = ()) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    output = gated_delta_rule(*leaves, LENGTHS, parents)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize("parents", [(), (-1, 0, 0, 2)])
def test_the_rule_is_that_of_the_cpu_and_gives_the_same_bits_twice(parents: tuple[int, ...]) -> None:
    on_cuda = [leaf.cuda() for leaf in inputs()]
    first, second = with_gradients(on_cuda, parents), with_gradients(on_cuda, parents)
    assert all(map(torch.equal, first, second))
    for found, expected in zip(first, with_gradients(inputs(), parents), strict=True):
        assert float((found.cpu() - expected).norm()) < 1e-5 * float(expected.norm())


@pytest.mark.skipif(not has_fla(), reason="flash-linear-attention is not installed")
def test_its_kernels_compute_the_same_up_to_bfloat16() -> None:
    query, key, value, decay, beta = (leaf.cuda() for leaf in inputs())
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    found = fla_gated_delta_rule(query, key, value.bfloat16(), decay, beta, starts)
    expected = gated_delta_rule(query, key, value, decay, beta, LENGTHS)
    assert float((found.float() - expected).norm()) < 0.02 * float(expected.norm())


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_qwen3_5_trains_on_cuda(make_runtime: MakeRuntime, tmp_path: Path, moe: bool, dtype: str) -> None:
    runtime = make_runtime(write_qwen3_5(tmp_path / "model", moe=moe), param_dtype=dtype)
    handle = runtime.build_model()
    losses = []
    for _ in range(4):
        runtime.zero_grad(handle)
        losses.append(runtime.forward_backward(handle, micro_batches([[0, 1, 2, 3], [4, 5, 6, 7]]), token_loss).loss)
        assert runtime.optimizer_step(handle).ok
    assert losses == sorted(losses, reverse=True)
