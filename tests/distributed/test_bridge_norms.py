"""The bridge's gradient norm, zeros and clipping, for shapes that do not align with anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import Head, OptimizerConfig, StepResult
from rl_backend.runtime.bridge.engine.optimizer import parameter_states
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import bridge_data, exported_gradients, write_tiny_mixture
from tests.support.critic import squared_error
from tests.support.models import write_tiny_qwen3
from tests.support.native import token_loss
from tests.support.rank_pool import RankPool

CLIP = 0.05
ODD = {
    "vocab_size": 8209,
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
}
"""A prime vocabulary, which two tensor-parallel ranks pad, and an embedding of 591,048 elements."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def odd_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("odd"), tie_word_embeddings=request.param, **ODD)


@pytest.fixture(scope="module")
def odd_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mixture(tmp_path_factory.mktemp("mixture"), **ODD, num_experts=6, moe_intermediate_size=22)


def step_job(
    model: str, layout: dict[str, int], head: Head, clip_grad: float
) -> tuple[StepResult, dict[str, Tensor], float]:
    """A first step, the whole gradients before it, and the norm of what Adam was given on all ranks."""
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=clip_grad, log_num_zeros_in_grad=True)
    with open_bridge(model, layout, optimizer=optimizer) as runtime:
        handle = runtime.build_model(head=head)
        runtime.forward_backward(handle, bridge_data(runtime), token_loss if head == "log_probs" else squared_error)
        gradients = exported_gradients(runtime, handle)
        result = runtime.optimizer_step(handle)
        assert handle.optimizer is not None
        moments = [state.tensors["exp_avg"].double() for state in parameter_states(handle.optimizer.megatron)]
        squares = torch.stack([(moment / (1 - optimizer.betas[0])).square().sum() for moment in moments]).sum()
        if dist.is_initialized():
            dist.all_reduce(squares)
        return result, gradients, float(squares.sqrt())


def check_step(ranks: RankPool, model: Path, world_size: int, layout: dict[str, int], head: Head = "log_probs") -> None:
    for result, gradients, _ in ranks.run(step_job, str(model), layout, head, CLIP, world_size=world_size):
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum()
        assert result.ok
        assert result.grad_norm == pytest.approx(float(squares.sqrt()), rel=1e-9)
        assert result.num_zeros == sum(int((gradient == 0).sum()) for gradient in gradients.values())


@pytest.mark.shows(
    "bridge: optimizer_step returns the norm and zeros of the whole gradient in dp, tp and pp, for a prime vocabulary"
)
@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})], ids=str)
def test_the_norm_and_zeros_are_those_of_the_gradients(
    ranks: RankPool, odd_model: Path, world_size: int, layout: dict[str, int]
) -> None:
    check_step(ranks, odd_model, world_size, layout)


@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (2, {"tp": 2}), (2, {"ep": 2}), (2, {"pp": 2})], ids=str)
def test_the_norm_of_a_mixture_is_that_of_its_gradients(
    ranks: RankPool, odd_mixture: Path, world_size: int, layout: dict[str, int]
) -> None:
    check_step(ranks, odd_mixture, world_size, layout)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_the_norm_of_a_critic_is_that_of_its_gradients(ranks: RankPool, odd_model: Path, layout: dict[str, int]) -> None:
    check_step(ranks, odd_model, 2, layout, head="values")


@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_scales_the_whole_gradient_to_the_limit(ranks: RankPool, odd_model: Path, world_size: int) -> None:
    """One rank, or two that share every parameter, so that each element is in one optimizer."""
    for result, _, clipped in ranks.run(step_job, str(odd_model), {}, "log_probs", CLIP, world_size=world_size):
        assert result.grad_norm > 2 * CLIP
        assert clipped == pytest.approx(CLIP, rel=2e-6)
    for result, _, unclipped in ranks.run(step_job, str(odd_model), {}, "log_probs", 0.0, world_size=world_size):
        assert unclipped == pytest.approx(result.grad_norm, rel=1e-6)
