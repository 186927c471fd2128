"""How often and in what dtype FSDP communicates: what no gradient shows, and what options promise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rl_backend.contracts import ModelOutput, OptimizerConfig, PackedBatch
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from tests.distributed.test_native_layouts import assert_same, run_layout
from tests.distributed.test_plan import unreduced
from tests.support.journeys import live_bytes
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import gradients, make_config, micro_batches, open_runtime, relative_difference, token_loss
from tests.support.rank_pool import RankPool


class Collectives(TorchDispatchMode):
    """Counts c10d's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def counting_job(model: str, sizes: list[int], settings: dict[str, Any]) -> list[dict[str, int]]:
    """Collectives of a pass over so many micro-batches of one sequence each."""
    found = []
    with open_runtime(model, **settings) as runtime:
        handle = runtime.build_model()
        for size in sizes:
            runtime.zero_grad(handle)
            with Collectives() as collectives:
                runtime.forward_backward(handle, micro_batches([[each] for each in range(size)], dp_size=2), token_loss)
            found.append(collectives.counts)
    return found


def reductions(counts: Mapping[str, int]) -> int:
    return sum(count for name, count in counts.items() if "reduce_scatter" in name)


def gathers(counts: Mapping[str, int]) -> int:
    return sum(count for name, count in counts.items() if "allgather" in name or "all_gather" in name)


def test_gradients_are_reduced_once_whatever_the_number_of_micro_batches(ranks: RankPool, untied_model: Path) -> None:
    one, four = ranks.run(counting_job, str(untied_model), [1, 4], {})[0]
    assert reductions(one) > 0
    assert reductions(four) == reductions(one)


def test_gradients_are_reduced_in_every_micro_batch_where_that_is_asked_for(ranks: RankPool, untied_model: Path) -> None:
    one, four = ranks.run(counting_job, str(untied_model), [1, 4], {"reduce_gradients": "per_micro_batch"})[0]
    assert reductions(four) == 4 * reductions(one) > 0


def kept_job(model: str, settings: dict[str, Any]) -> list[int]:
    """Bytes of what a rank has made in a pass and still has when its second, and its third micro-batch begins."""
    found: list[int] = []
    with open_runtime(model, **settings) as runtime:
        handle = runtime.build_model()
        data = micro_batches([[0, 1], [2, 3], [4, 5]], dp_size=2)
        # The first pass makes what stays.
        runtime.forward_backward(handle, data, token_loss)
        runtime.zero_grad(handle)
        before = live_bytes()

        def begins(*_: Any) -> None:
            # Python sees no gradient that it has not asked for.
            gradients = unreduced(handle.model), [value.grad for value in handle.parameters.values()]
            found.append(live_bytes() - before)
            del gradients

        # Before FSDP gathers the parameters of the root.
        handle.model.register_forward_pre_hook(begins, prepend=True)
        runtime.forward_backward(handle, data, token_loss)
    return found[1:]


@pytest.mark.shows(
    "runtime: with reduce_gradients=per_micro_batch a rank keeps shards of gradients between micro-batches, as planned"
)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_what_is_kept_between_micro_batches_are_shards_where_gradients_are_reduced_in_each(
    ranks: RankPool, tmp_path: Path, param_dtype: str
) -> None:
    # Wide enough for gradients to be more than what a pass notes of its results, and deep enough for two layers to be few.
    model = write_tiny("qwen3", tmp_path / "model", intermediate_size=512, num_hidden_layers=6)
    work = Workload(sequence_length=64, micro_batch_tokens=64, num_micro_batches=3)
    for reduce_gradients in ("once", "per_micro_batch"):
        settings = {"param_dtype": param_dtype, "reduce_gradients": reduce_gradients}
        (planned,) = make_plan(make_config(model, **settings), 2, work).ranks
        expected = planned.unreduced_gradients if reduce_gradients == "once" else planned.gradients
        for kept in ranks.run(kept_job, str(model), settings):
            assert kept == pytest.approx([expected] * 2, rel=0.1), reduce_gradients
    assert 0 < planned.unreduced_gradients < planned.gradients, "of two layers"


def test_parameters_that_stay_after_the_forward_pass_are_not_gathered_again(ranks: RankPool, untied_model: Path) -> None:
    (freed,), (kept,) = (
        ranks.run(counting_job, str(untied_model), [1], {"reshard_after_forward": value})[0] for value in (True, False)
    )
    assert reductions(kept) == reductions(freed)
    # Every layer once in the forward pass; the backward pass gathers what was freed.
    assert gathers(kept) <= gathers(freed) - 2


def dtype_job(model: str, reduce_dtype: str) -> dict[str, torch.Tensor]:
    with open_runtime(model, param_dtype="bfloat16", reduce_dtype=reduce_dtype) as runtime:
        handle = runtime.build_model()
        mine = [[0], [1]] if handle.data_parallel_rank == 0 else [[2], [3]]
        runtime.forward_backward(handle, micro_batches(mine, dp_size=2), token_loss)
        found = gradients(handle)
    return found if dist.get_rank() == 0 else {}


def test_gradients_are_reduced_in_the_dtype_asked_for(ranks: RankPool, untied_model: Path) -> None:
    exact, rounded = (ranks.run(dtype_job, str(untied_model), dtype)[0] for dtype in ("float32", "bfloat16"))
    for name, gradient in rounded.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient.to(torch.bfloat16).float(), gradient), name
    assert any(not torch.equal(gradient.to(torch.bfloat16).float(), gradient) for gradient in exact.values())


def entropy_loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    assert model_output.entropy is not None
    loss, metrics = token_loss(model_output, data, dp_group)
    return loss - 0.5 * (model_output.entropy * data.token_field("loss_mask")).sum() / data.meta["batch_num_tokens"], metrics


def entropy_job(model: str, parallel: dict[str, int], with_entropy: bool) -> dict[str, torch.Tensor]:
    with open_runtime(model, parallel=parallel, optimizer=OptimizerConfig(lr=1e-3)) as runtime:
        handle = runtime.build_model()
        data = micro_batches([[0, 1], [2]], calculate_entropy=True)
        runtime.forward_backward(handle, data, entropy_loss if with_entropy else token_loss)
        found = gradients(handle)
    return found if dist.get_rank() == 0 else {}


def test_the_gradient_of_the_entropy_is_one_ranks_under_tensor_parallelism(ranks: RankPool, untied_model: Path) -> None:
    (one,) = ranks.run(entropy_job, str(untied_model), {}, True, world_size=1)
    (without,) = ranks.run(entropy_job, str(untied_model), {}, False, world_size=1)
    split = ranks.run(entropy_job, str(untied_model), {"tp": 2}, True)[0]
    assert one.keys() == split.keys()
    for name, gradient in split.items():
        assert relative_difference(gradient, one[name]) < 1e-5, name
    assert max(relative_difference(without[name], one[name]) for name in one) > 0.01


def test_router_losses_of_a_pipeline_are_averaged_over_micro_batches_as_on_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    mixture = write_moe("qwen3_moe", tmp_path / "mixture")
    losses = {"model": "qwen3_moe", "model_cfg": {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.2}}
    assert_same(run_layout(ranks, 2, mixture, {"pp": 2}, losses), run_layout(ranks, 1, mixture, {}, losses))
