"""Gradients in Megatron's buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import ConfigError, HandleError, OptimizerConfig
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import SPLIT, bridge_data, exported_gradients, write_tiny_mixture
from tests.support.native import (
    assert_equal_tensors,
    assert_near,
    micro_batches,
    open_runtime,
    relative_difference,
    token_loss,
)
from tests.support.rank_pool import RankPool

LAYOUTS = [(2, {}), (2, {"tp": 2}), (2, {"pp": 2}), (4, {"tp": 2, "pp": 2})]
MIXTURE_LAYOUTS = [(2, {}), (2, {"ep": 2}), (2, {"pp": 2}), (4, {"ep": 2})]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mixture(tmp_path_factory.mktemp("mixture"))


def gradients_job(model: str, layout: dict[str, int]) -> tuple[dict[str, Tensor], float]:
    """Whole gradients of one batch and their norm; ranks must agree on them."""
    with open_bridge(model, layout, optimizer=OptimizerConfig(lr=1e-3, clip_grad=0.1)) as runtime:
        handle = runtime.build_model()
        runtime.forward_backward(handle, bridge_data(runtime), token_loss)
        gradients = exported_gradients(runtime, handle)
        assert list(gradients) == [info.name for info in runtime.weight_infos(handle)]
        return gradients, runtime.optimizer_step(handle).grad_norm


def native_gradients_job(model: str) -> dict[str, Tensor]:
    with open_runtime(model) as runtime:
        handle = runtime.build_model()
        runtime.forward_backward(handle, micro_batches(SPLIT), token_loss)
        return {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in gradients.values()]).sum().sqrt())


@pytest.fixture(scope="module")
def native_gradients(ranks: RankPool, tied_model: Path) -> dict[str, Tensor]:
    return ranks.run(native_gradients_job, str(tied_model), world_size=1)[0]


@pytest.mark.shows("bridge: export_gradients gives the native runtime's whole gradients under Hugging Face names")
@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), *LAYOUTS], ids=str)
def test_exported_gradients_are_the_native_ones_before_clipping(
    ranks: RankPool,
    tied_model: Path,
    native_gradients: dict[str, Tensor],
    world_size: int,
    layout: dict[str, int],
) -> None:
    for gradients, grad_norm in ranks.run(gradients_job, str(tied_model), layout, world_size=world_size):
        assert gradients.keys() == native_gradients.keys()
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert relative_difference(gradient, native_gradients[name]) < 1e-5, name
        assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)


@pytest.fixture(scope="module")
def mixture_gradients(ranks: RankPool, mixture: Path) -> dict[str, Tensor]:
    return ranks.run(gradients_job, str(mixture), {}, world_size=1)[0][0]


@pytest.mark.parametrize(("world_size", "layout"), MIXTURE_LAYOUTS, ids=str)
def test_gradients_of_experts_are_those_of_one_rank(
    ranks: RankPool, mixture: Path, mixture_gradients: dict[str, Tensor], world_size: int, layout: dict[str, int]
) -> None:
    for gradients, grad_norm in ranks.run(gradients_job, str(mixture), layout, world_size=world_size):
        assert_near(gradients, mixture_gradients)
        assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)


def accumulate_job(model: str, layout: dict[str, int], settings: dict[str, Any]) -> None:
    with open_bridge(model, layout, **settings) as runtime:
        handle = runtime.build_model()
        first, second = bridge_data(runtime, 0), bridge_data(runtime, 1)
        alone = []
        for data in (first, second):
            runtime.zero_grad(handle)
            runtime.forward_backward(handle, data, token_loss)
            alone.append(exported_gradients(runtime, handle))
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, first, token_loss)
        runtime.forward_backward(handle, second, None, forward_only=True)
        assert_equal_tensors(exported_gradients(runtime, handle), alone[0])
        runtime.forward_backward(handle, second, token_loss)
        both = exported_gradients(runtime, handle)
        assert_equal_tensors(both, {name: alone[1][name] + alone[0][name] for name in both})


@pytest.mark.shows("bridge: gradients of several forward_backward calls add up until zero_grad")
@pytest.mark.parametrize(
    ("world_size", "layout", "settings"),
    [
        (1, {}, {}),
        (2, {}, {}),
        (2, {"pp": 2}, {}),
        (2, {}, {"override_ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
        (4, {"tp": 2}, {}),
    ],
    ids=str,
)
def test_gradients_of_several_passes_add_up(
    ranks: RankPool, tied_model: Path, world_size: int, layout: dict[str, int], settings: dict[str, Any]
) -> None:
    ranks.run(accumulate_job, str(tied_model), layout, settings, world_size=world_size)


def repaired_job(model: str, passes_before: int) -> None:
    """Fails near the end of a backward pass, after other buckets have begun to be reduced."""
    with open_bridge(model, override_ddp_config={"overlap_grad_reduce": True, "bucket_size": 10_000}) as runtime:
        handle, other = runtime.build_model(), runtime.build_model()
        data, groups = bridge_data(runtime), handle.chunks[0].bucket_groups
        for _ in range(passes_before):
            runtime.forward_backward(handle, data, token_loss)
            runtime.zero_grad(handle)
        passed = list[Tensor]()

        def fail(gradient: Tensor) -> None:
            passed.append(gradient)
            if len(passed) == len(data):
                raise RuntimeError("on purpose")

        norm_of_layer = next(each for name, each in handle.models[0].named_parameters() if "input_layernorm" in name)
        removable = norm_of_layer.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            runtime.forward_backward(handle, data, token_loss)
        removable.remove()
        assert any(0 < len(each.per_param_grad_ready_counts) < len(each.params) for each in groups)
        # Megatron reduces its first gradients at the end of the pass.
        assert any(each.grad_reduce_handle is not None for each in groups) is bool(passes_before)
        with pytest.raises(HandleError, match="call zero_grad first"):
            runtime.optimizer_step(handle)
        for each in (handle, other):
            runtime.zero_grad(each)
            runtime.forward_backward(each, data, token_loss)
        assert_equal_tensors(exported_gradients(runtime, handle), exported_gradients(runtime, other))


@pytest.mark.shows("bridge: zero_grad repairs a backward pass that failed while gradients were being reduced")
@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_backward_pass_that_failed_is_repaired_by_zero_grad(ranks: RankPool, tied_model: Path, passes_before: int) -> None:
    ranks.run(repaired_job, str(tied_model), passes_before)


def refusals_job(model: str) -> None:
    with open_bridge(model) as runtime:
        handle, reference = runtime.build_model(), runtime.build_model(forward_only=True)
        for refused, message in ((handle, "call forward_backward first"), (reference, "forward-only")):
            with pytest.raises(HandleError, match=message):
                runtime.export_gradients(refused)
        runtime.forward_backward(handle, bridge_data(runtime), token_loss)
        with pytest.raises(ConfigError, match="nrom"):
            runtime.export_gradients(handle, names=["model.nrom.weight"])
        chosen = ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"]
        assert set(exported_gradients(runtime, handle, names=chosen)) == set(chosen)


def test_gradients_that_are_not_there_are_refused(ranks: RankPool, tied_model: Path) -> None:
    ranks.run(refusals_job, str(tied_model), world_size=1)
