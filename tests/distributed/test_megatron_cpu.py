"""Every patch that lets Megatron run on a CPU is still needed, and none is left behind."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.runtime.bridge.megatron import cpu as megatron_cpu
from rl_backend.runtime.bridge.megatron.cpu import PATCHES, Patch, on_cpu
from tests.support.bridge_runs import open_bridge, share
from tests.support.moe import write_moe
from tests.support.native import micro_batches, token_loss
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron uses the CUDA device here")


def name(patch: Patch) -> str:
    owner = (
        patch.owner
        if isinstance(patch.owner, str)
        else f"{patch.owner.__module__}.{patch.owner.__name__}"
        if isinstance(patch.owner, type)
        else patch.owner.__name__
    )
    return f"{owner}.{patch.attribute}"


def error_job(model: str, parallel: Mapping[str, int], without: str) -> str | None:
    """The error of a step with all patches but one."""
    megatron_cpu.PATCHES = tuple(patch for patch in PATCHES if name(patch) != without)
    try:
        with open_bridge(model, parallel) as runtime:
            handle = runtime.build_model()
            runtime.forward_backward(handle, micro_batches(share(handle), dp_size=handle.data_parallel_size), token_loss)
            runtime.optimizer_step(handle)
    except (RuntimeError, TypeError, AttributeError, AssertionError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        megatron_cpu.PATCHES = PATCHES
    return None


NEEDED_BY: dict[str, tuple[int, dict[str, int]]] = {
    "torch.cuda.current_device": (1, {}),
    "torch.cuda.current_stream": (1, {}),
    "torch.cuda.Stream": (1, {}),
    "torch.Tensor.type": (1, {}),
    "torch.cuda.get_rng_state": (1, {}),
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": (1, {}),
    "torch.Tensor.cuda": (2, {"pp": 2}),
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": (2, {"ep": 2}),
}
"""Patch -> ranks and layout of a run that raises without it."""
_DELTANET = "megatron.core.ssm.gated_delta_net"
FOR_DELTANET = (
    f"{_DELTANET}.common.HAVE_FLA",
    f"{_DELTANET}.common.l2norm",
    f"{_DELTANET}.gdn.causal_conv1d",
    f"{_DELTANET}.gdn.chunk_gated_delta_rule",
)
FOR_MINIMAX = "megatron.bridge.models.minimax_m2.minimax_m2_bridge._FullDimQKNormMapping"
FOR_RANDOM_STATES = {"torch.cuda.manual_seed", "megatron.core.tensor_parallel.random._set_cuda_rng_state"}
"""Without these nothing is raised, but random states are not what Megatron set."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixture"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def deltanet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = ["linear_attention", "full_attention"]
    return write_qwen3_5(tmp_path_factory.mktemp("deltanet"), layers=2, layer_types=layers)


def test_every_patch_has_a_test() -> None:
    assert {name(patch) for patch in PATCHES} == NEEDED_BY.keys() | FOR_RANDOM_STATES | {*FOR_DELTANET, FOR_MINIMAX}


@pytest.mark.parametrize("patch", NEEDED_BY)
def test_megatron_raises_without_the_patch(ranks: RankPool, mixture: Path, patch: str) -> None:
    world_size, parallel = NEEDED_BY[patch]
    for result in ranks.run(error_job, str(mixture), parallel, patch, world_size=world_size):
        assert result is not None, "Megatron runs without this patch: remove it"


@pytest.mark.parametrize("patch", FOR_DELTANET)
def test_gated_deltanet_raises_without_the_patch(ranks: RankPool, deltanet: Path, patch: str) -> None:
    (result,) = ranks.run(error_job, str(deltanet), {}, patch, world_size=1)
    assert result is not None, "Megatron computes gated DeltaNet on a CPU without this patch: remove it"


def test_norms_over_all_heads_raise_without_the_patch(ranks: RankPool, tmp_path: Path) -> None:
    model = str(write_moe("minimax_m2", tmp_path / "model", num_hidden_layers=1))
    assert all(ranks.run(error_job, model, {"tp": 2}, FOR_MINIMAX, world_size=2)), "Megatron-Bridge loads them on a CPU"
    assert ranks.run(error_job, model, {"tp": 2}, "", world_size=2) == [None, None]


def compiled_job(model: str, stance: Mapping[str, Any]) -> int:
    """How many functions Megatron gives to the compiler in one step."""
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    set_stance = torch.compiler.set_stance
    counters.clear()
    # tests/e2e turns the compiler off in the environment of all processes of a lane.
    with pytest.MonkeyPatch.context() as patch, config.patch(disable=False):
        patch.setattr(torch.compiler, "set_stance", lambda *_: set_stance(**stance))
        assert error_job(model, {}, "") is None
    return counters["frames"]["total"]


def test_nothing_is_compiled(deltanet: Path) -> None:
    # In a new process: what one has compiled, or given up to compile, it does not compile again.
    pool = RankPool(1, preload=["tests.support.bridge_runs"])
    try:
        assert pool.run(compiled_job, str(deltanet), {"stance": "force_eager"}, world_size=1) == [0]
        (compiled,) = pool.run(compiled_job, str(deltanet), {"force_backend": "eager"}, world_size=1)
    finally:
        pool.close()
    assert compiled > 0, "Megatron compiles nothing: the stance of the compiler need not be set"


def random_states_job(model: str, without: str | None) -> tuple[int, bool]:
    """How many of Megatron's random states differ, and whether drawing from one leaves torch's generator alone."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    megatron_cpu.PATCHES = tuple(patch for patch in PATCHES if name(patch) != without)
    try:
        with open_bridge(model) as runtime, on_cpu(runtime.engine.groups.device):
            tracker = get_cuda_rng_tracker()
            states = {state.numpy().tobytes() for state in tracker.get_states().values()}
            before = torch.get_rng_state()
            with tracker.fork():
                torch.rand(1)
            return len(states), torch.equal(before, torch.get_rng_state())
    finally:
        megatron_cpu.PATCHES = PATCHES


def test_megatron_has_random_states_of_its_own(ranks: RankPool, tied_model: Path) -> None:
    def run(without: str | None) -> tuple[int, bool]:
        (result,) = ranks.run(random_states_job, str(tied_model), without, world_size=1)
        return result

    assert run(None) == (3, True)
    assert run("torch.cuda.manual_seed") == (1, True)
    assert run("megatron.core.tensor_parallel.random._set_cuda_rng_state")[1] is False


@pytest.mark.shows("bridge: Megatron trains on a CPU without CUDA, and torch outside it is unchanged")
def test_outside_of_the_context_torch_is_as_it_was() -> None:
    def found() -> list[Any]:
        owners = [importlib.import_module(p.owner) if isinstance(p.owner, str) else p.owner for p in PATCHES]
        return [getattr(owner, patch.attribute) for owner, patch in zip(owners, PATCHES, strict=True)]

    before = found()
    with on_cpu(torch.device("cpu")), on_cpu(torch.device("cpu")):
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).to("cuda:0").device.type == "cpu"
        assert all(now is not then for now, then in zip(found(), before, strict=True))
    assert found() == before


def test_on_cuda_nothing_is_patched() -> None:
    before = torch.cuda.current_stream
    with on_cpu(torch.device("cuda", 0)):
        assert torch.cuda.current_stream is before


def test_an_error_inside_leaves_nothing_behind() -> None:
    before = torch.cuda.current_stream
    with pytest.raises(ValueError, match="inside"), on_cpu(torch.device("cpu")):
        raise ValueError("inside")
    assert torch.cuda.current_stream is before
