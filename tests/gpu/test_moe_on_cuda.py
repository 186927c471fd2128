"""Mixtures of experts on CUDA: the grouped matmul against products of each group, and training in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_backend.model.feedforward.moe import MoE
from rl_backend.primitive.grouped_linear import _GroupByGroup, _has_kernel, grouped_linear
from rl_backend.primitive.router import RouterSettings
from tests.gpu.conftest import MakeRuntime
from tests.support.moe import write_moe
from tests.support.native import micro_batches, token_loss
from tests.support.routes import SPLIT, with_routes

pytestmark = pytest.mark.gpu


def test_the_grouped_matmul_equals_products_of_each_group_and_empty_groups_have_zero_gradients() -> None:
    counts = torch.tensor([0, 37, 0, 1, 300, 0], device="cuda")
    x = torch.randn(338, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(6, 48, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mix = torch.randn(338, 48, device="cuda", dtype=torch.bfloat16)
    assert _has_kernel(x, weight)
    found = []
    for function in (grouped_linear, _GroupByGroup.apply):
        x.grad = weight.grad = None
        product = function(x, weight, counts)
        (product * mix).sum().backward()
        found.append((product.detach(), x.grad, weight.grad))
    torch.testing.assert_close(found[0], found[1], atol=0.1, rtol=0.02)
    assert not found[0][2][[0, 2, 5]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_gives_the_same_bits_twice(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    moe = MoE(64, 32, RouterSettings(16, 4, normalise=True)).cuda()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    moe.to(dtype)
    x = torch.randn(999, 64, device="cuda", dtype=dtype, requires_grad=True)
    gradients = []
    for _ in range(2):
        moe.zero_grad()
        x.grad = None
        moe(x).float().square().sum().backward()
        assert x.grad is not None
        gradients.append([x.grad, *(parameter.grad.clone() for parameter in moe.parameters() if parameter.grad is not None)])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_trains_on_cuda(make_runtime: MakeRuntime, tmp_path: Path, dtype: str) -> None:
    runtime = make_runtime(write_moe("qwen3_moe, dense layers between", tmp_path / "model"), param_dtype=dtype)
    handle = runtime.build_model()
    losses = []
    for _ in range(4):
        runtime.zero_grad(handle)
        losses.append(runtime.forward_backward(handle, micro_batches([[0, 1, 2, 3], [4, 5, 6, 7]]), token_loss).loss)
        assert runtime.optimizer_step(handle).ok
    assert losses == sorted(losses, reverse=True)


def test_routes_are_recorded_and_replayed_on_cuda(make_runtime: MakeRuntime, tmp_path: Path) -> None:
    runtime = make_runtime(write_moe("qwen3_moe", tmp_path / "model"), param_dtype="bfloat16")
    handle = runtime.build_model()
    data = micro_batches(SPLIT)
    first = runtime.forward_backward(handle, data, token_loss, router_replay="record")
    recorded = dict(enumerate(first.output("routed_experts")))
    shifted = {index: (routes + 1) % 4 for index, routes in recorded.items()}
    again, other = (
        runtime.forward_backward(handle, with_routes(data, SPLIT, routes), token_loss, router_replay="replay").loss
        for routes in (recorded, shifted)
    )
    assert again == pytest.approx(first.loss, rel=1e-6)
    assert abs(other - first.loss) > 1e-3
