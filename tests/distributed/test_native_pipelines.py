"""The native runtime trains the same with every pipeline schedule, as one rank does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.pipeline.catalog import make_schedule
from rl_backend.pipeline.executor import PipelineExecutor
from rl_backend.runtime.native import forward_backward
from tests.distributed import test_plan
from tests.distributed.test_native_layouts import SPLIT, Run, assert_same, run_layout
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import (
    assert_near,
    micro_batches,
    open_runtime,
    token_loss,
)
from tests.support.rank_pool import RankPool

STAGES_PER_RANK = {"1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "zb-h2": 1, "zbv": 2, "dualpipev": 2}
# On 4 ranks DualPipeV needs 8 micro-batches, as the test of peak activations has.
SCHEDULES = [(name, pp) for pp in (2, 4) for name in STAGES_PER_RANK if (name, pp) != ("dualpipev", 4)]
ZBV = {"pipeline_schedule": "zbv"}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine layers: they do not divide evenly, and are enough for eight stages. Tied embeddings are at both ends."""
    return write_tiny("qwen3", tmp_path_factory.mktemp("dense"), num_hidden_layers=9, hidden_size=32, intermediate_size=64)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen2", tmp_path_factory.mktemp("untied"), num_hidden_layers=4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe, dense layers between", tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def dense_on_one_rank(dense: Path, ranks: RankPool) -> Run:
    return run_layout(ranks, 1, dense, {}, {})


@pytest.fixture(scope="module")
def mixture_on_one_rank(mixture: Path, ranks: RankPool) -> Run:
    return run_layout(ranks, 1, mixture, {}, {})


@pytest.mark.shows(
    "runtime: all six pipeline schedules on 2 and 4 native ranks match one rank's losses and gradients to 1e-5"
)
@pytest.mark.parametrize(("schedule", "pp"), sampled(SCHEDULES, *(case for case in SCHEDULES if case[1] == 2)))
def test_every_schedule_trains_as_one_rank(
    ranks: RankPool, dense: Path, dense_on_one_rank: Run, schedule: str, pp: int
) -> None:
    layout = {"pp": pp, "vpp": STAGES_PER_RANK[schedule]}
    assert_same(run_layout(ranks, pp, dense, layout, {"pipeline_schedule": schedule}), dense_on_one_rank)


@pytest.mark.shows("runtime: pipelines with dp, tp, cp and ep inside a stage match one rank's losses and gradients to 1e-5")
@pytest.mark.parametrize("inside", sampled([{}, {"tp": 2}, {"cp": 2}], {"tp": 2}), ids=["dp2", "tp2", "cp2"])
def test_stages_are_laid_out_over_ranks_themselves(
    ranks: RankPool, dense: Path, dense_on_one_rank: Run, inside: dict[str, int]
) -> None:
    assert_same(run_layout(ranks, 4, dense, {"pp": 2, "vpp": 2, **inside}, ZBV), dense_on_one_rank)


@pytest.mark.parametrize(("world", "layout"), [(2, {"pp": 2, "vpp": 2}), (4, {"pp": 2, "vpp": 2, "ep": 2})])
def test_mixtures_of_experts_train_in_a_pipeline_as_on_one_rank(
    ranks: RankPool, mixture: Path, mixture_on_one_rank: Run, world: int, layout: dict[str, int]
) -> None:
    assert_same(run_layout(ranks, world, mixture, layout, ZBV), mixture_on_one_rank)


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({"pipeline_schedule": "zbv", "activation_checkpointing": "full"}, {"pp": 2, "vpp": 2}),
        ({"pipeline_schedule": "zb-h1", "activation_checkpointing": "selective"}, {"pp": 2}),
        ({"pipeline_schedule": "zb-h1", "reshard_after_forward": False}, {"pp": 2}),
        ({"pipeline_schedule": "zbv", "pipeline_layers": (1, 4, 2, 2)}, {"pp": 2, "vpp": 2}),
        ({"pipeline_schedule": "interleaved-1f1b", "reduce_gradients": "per_micro_batch"}, {"pp": 2, "vpp": 2}),
    ],
    ids=["recomputation", "a part kept", "parameters stay gathered", "layers as one says", "reduced in each"],
)
def test_options_change_nothing(
    ranks: RankPool, dense: Path, dense_on_one_rank: Run, settings: dict[str, Any], layout: dict[str, int]
) -> None:
    assert_same(run_layout(ranks, 2, dense, layout, settings), dense_on_one_rank)


def waiting_job(model: str, reduction: str) -> int:
    """Bytes of whole gradients that this rank has when its last micro-batch begins."""
    layout = {"parallel": {"pp": 2}, "pipeline_schedule": "1f1b"}
    with open_runtime(model, reduce_gradients=reduction, **layout) as runtime:
        handle = runtime.build_model()
        (stage,) = handle.stages.values()
        waiting: list[int] = []

        def begins(*_: Any) -> None:
            waiting.append(test_plan.held(test_plan.unreduced(stage)))

        stage.register_forward_pre_hook(begins, prepend=True)
        runtime.forward_backward(handle, micro_batches(SPLIT), token_loss)
        return waiting[-1]


@pytest.mark.shows("runtime: with reduce_gradients=per_micro_batch stages of a pipeline keep no whole gradients either")
def test_stages_keep_no_whole_gradients_where_they_are_reduced_in_each_micro_batch(ranks: RankPool, dense: Path) -> None:
    assert min(ranks.run(waiting_job, str(dense), "once")) > 0
    assert ranks.run(waiting_job, str(dense), "per_micro_batch") == [0, 0]


def attentions_job(model: str, schedule: str, vpp: int) -> tuple[int, int]:
    """Layers of this rank, and how often their attention ran for four micro-batches."""
    settings = {"pipeline_schedule": schedule, "activation_checkpointing": "full"}
    with open_runtime(model, parallel={"pp": 2, "vpp": vpp}, **settings) as runtime:
        handle = runtime.build_model()
        calls: list[None] = []
        attentions = [module for name, module in handle.model.named_modules() if name.endswith("self_attn")]
        for attention in attentions:
            attention.register_forward_hook(lambda *_: calls.append(None))
        runtime.forward_backward(handle, micro_batches(SPLIT), token_loss)
        return len(attentions), len(calls)


@pytest.mark.shows("runtime: activation checkpointing recomputes each layer once, even in a split backward pass")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "zbv"])
def test_every_layer_is_recomputed_once(ranks: RankPool, dense: Path, schedule: str) -> None:
    for layers, calls in ranks.run(attentions_job, str(dense), schedule, STAGES_PER_RANK[schedule], world_size=2):
        assert calls == layers * len(SPLIT) * 2


@pytest.mark.parametrize(("schedule", "vpp"), [("zbv", 2), ("zb-h1", 1)])
def test_one_rank_is_the_trivial_pipeline(
    ranks: RankPool, dense: Path, dense_on_one_rank: Run, schedule: str, vpp: int
) -> None:
    assert_same(run_layout(ranks, 1, dense, {"vpp": vpp}, {"pipeline_schedule": schedule}), dense_on_one_rank)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_untied_heads_and_biases(ranks: RankPool, untied: Path, schedule: str) -> None:
    layout = {"pp": 2, "vpp": STAGES_PER_RANK[schedule]}
    expected = run_layout(ranks, 1, untied, {}, {})
    assert_same(run_layout(ranks, 2, untied, layout, {"pipeline_schedule": schedule}), expected)


def many_job(model: str, layout: Mapping[str, int], settings: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients of eight micro-batches, and the most activations that the executor held and that the schedule promises."""
    with open_runtime(model, parallel=dict(layout), **settings) as runtime:
        handle = runtime.build_model()
        executors = []

        class Watched(PipelineExecutor):
            def run(self) -> None:
                executors.append(self)
                super().run()

        forward_backward.PipelineExecutor, original = Watched, forward_backward.PipelineExecutor  # type: ignore[misc]
        try:
            runtime.forward_backward(handle, micro_batches([[index] for index in range(8)]), token_loss)
        finally:
            forward_backward.PipelineExecutor = original  # type: ignore[misc]
        gradients = {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
        held = executors[0].peak_activations if executors else 0
        return gradients, held, handle.groups.pp_group.rank()


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_the_executor_holds_the_activations_that_the_schedule_promises(ranks: RankPool, dense: Path, schedule: str) -> None:
    layout = {"pp": 4, "vpp": STAGES_PER_RANK[schedule]}
    ((expected, _, _),) = ranks.run(many_job, str(dense), {}, {}, world_size=1)
    promised = make_schedule(schedule, 4, 8, stages_per_rank=STAGES_PER_RANK[schedule]).peak_activations
    for gradients, held, rank in ranks.run(many_job, str(dense), layout, {"pipeline_schedule": schedule}, world_size=4):
        assert held == promised[rank]
        assert_near(gradients, expected)


@pytest.mark.parametrize(
    ("native", "message"),
    [
        ({"parallel": {"pp": 2}, "pipeline_schedule": "zbv"}, r"vpp=1: zbv needs 2 stages per rank.*set vpp=2"),
        ({"parallel": {"pp": 2, "vpp": 2}, "pipeline_schedule": "1f1b"}, r"vpp=2: 1f1b has 1 stage per rank; set vpp=1"),
        ({"parallel": {"pp": 10}}, r"ParallelConfig\.pp=10: .*the model has 9; use at most 9 stages"),
        ({"parallel": {"pp": 2}, "pipeline_layers": (4, 4)}, r"pipeline_layers=\(4, 4\): .*model's 9 layers.*add up to 8"),
        ({"pipeline_layers": (9,)}, r"pipeline_layers=\(9,\): without a pipeline there are no stages"),
    ],
    ids=str,
)
def test_pipelines_that_cannot_be_are_refused_before_ranks_start(dense: Path, native: dict[str, Any], message: str) -> None:
    from rl_backend import RuntimeConfig, check_config

    config = RuntimeConfig(hf_path=str(dense), backend_cfg=native)
    with pytest.raises(ConfigError, match=message):
        check_config(config, config.backend_cfg.parallel.pp)


def gradients_of_calls_job(
    model: str, split: list[list[int]], num_calls: int, layout: Mapping[str, int], settings: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    with open_runtime(model, parallel=dict(layout), **settings) as runtime:
        handle = runtime.build_model()
        batches = micro_batches(split)
        each = len(batches) // num_calls
        for first in range(0, len(batches), each):
            runtime.forward_backward(handle, batches[first : first + each], token_loss)
        return {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}


@pytest.mark.parametrize(
    ("world", "layout", "schedule"),
    [(1, {"vpp": 2}, "auto"), (2, {"pp": 2}, "1f1b"), (2, {"pp": 2, "vpp": 2}, "zbv")],
    ids=["both ends in one process", "ends on two ranks", "both ends on one rank of two"],
)
def test_gradients_of_several_calls_add_up_also_where_embeddings_are_tied(
    ranks: RankPool, dense: Path, world: int, layout: dict[str, int], schedule: str
) -> None:
    settings = {"pipeline_schedule": schedule}
    (expected,) = ranks.run(gradients_of_calls_job, str(dense), SPLIT, 1, {}, {}, world_size=1)
    for gradients in ranks.run(gradients_of_calls_job, str(dense), SPLIT, 2, layout, settings, world_size=world):
        assert_near(gradients, expected)


@pytest.mark.parametrize("split", [SPLIT, [list(range(8))]], ids=["four micro-batches", "one"])
@pytest.mark.parametrize(("world", "layout"), [(1, {"vpp": 2}), (2, {"pp": 2, "vpp": 2})], ids=["pp1", "pp2"])
def test_weight_gradients_that_are_put_off_are_accumulated_in_the_reduction_dtype(
    ranks: RankPool, dense: Path, world: int, layout: dict[str, int], split: list[list[int]]
) -> None:
    bfloat16 = {"param_dtype": "bfloat16"}
    (expected,) = ranks.run(gradients_of_calls_job, str(dense), split, 1, {}, bfloat16, world_size=1)
    for gradients in ranks.run(gradients_of_calls_job, str(dense), split, 1, layout, bfloat16 | ZBV, world_size=world):
        assert_near(gradients, expected, 5e-3)


def micro_batches_job(model: str) -> list[str]:
    messages = []
    with open_runtime(model, parallel={"pp": 2, "vpp": 2}) as runtime:
        handle = runtime.build_model()
        assert handle.micro_batch_multiple == 2
        for split in ([], SPLIT[:3]):
            try:
                runtime.forward_backward(handle, micro_batches(split), token_loss)
            except BatchError as error:
                messages.append(str(error))
        runtime.forward_backward(handle, micro_batches(SPLIT[:3]), None, forward_only=True)
    return messages


def test_numbers_of_micro_batches_that_a_schedule_cannot_do_are_refused(ranks: RankPool, dense: Path) -> None:
    for none, odd in ranks.run(micro_batches_job, str(dense), world_size=2):
        assert "forward_backward without micro-batches" in none
        assert "3 micro-batches: interleaved-1f1b with pp=2 takes them in groups of pp" in odd
