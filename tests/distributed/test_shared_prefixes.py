"""Shared prefixes computed once: every layout trains as it does without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.data import prefixes
from tests.support.deepseek import write_latent
from tests.support.layouts import layouts
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import assert_near, full, gradients, open_in_float64, token_loss
from tests.support.qwen3_5 import write_qwen3_next
from tests.support.random_trees import sequences_of_a_tree
from tests.support.rank_pool import RankPool

STEPS = 2


class Run(NamedTuple):
    losses: list[float]
    log_probs: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    computed: float  # tokens, for one of the batch


def train_job(model: str, layout: Mapping[str, int], settings: Mapping[str, Any], share: str) -> Run:
    from rl_backend.contracts import TokenSequence
    from rl_backend.data import pack

    before, prefixes.SHORTEST_RUN = prefixes.SHORTEST_RUN, 1
    try:
        with open_in_float64(model, parallel=dict(layout), share_prefixes=share, **settings) as runtime:
            handle = runtime.build_model()
            seed = 10 * handle.data_parallel_rank
            batches = []
            for micro_batch in range(4):
                rows = [
                    TokenSequence(ids, {"loss_mask": (torch.arange(len(ids)) < len(ids) - 1).double()})
                    for ids in sequences_of_a_tree(seed + micro_batch)
                ]
                batches.append(
                    pack(rows, {"batch_num_tokens": 100.0, "dp_size": handle.data_parallel_size, "temperature": 0.7})
                )
            run = Run([], [], {}, {}, 1.0)
            for step in range(STEPS):
                runtime.zero_grad(handle)
                result = runtime.forward_backward(handle, batches, token_loss)
                if step == 0:
                    run = run._replace(log_probs=list(result.outputs.get("log_probs", [])), gradients=gradients(handle))
                    if "tokens_computed" in result.metrics:
                        run = run._replace(computed=result.metrics["tokens_computed"].mean)
                assert runtime.optimizer_step(handle).ok
                run.losses.append(result.loss)
            weights = {name: full(value) for name, value in handle.parameters.items()}
            return run._replace(weights=weights)
    finally:
        prefixes.SHORTEST_RUN = before


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": write_tiny("qwen3", folder / "dense", num_hidden_layers=4),
        "mixture": write_moe("qwen3_moe", folder / "mixture"),
        "recurrent": write_qwen3_next(folder / "recurrent"),
        "latent": write_latent("deepseek_v3", folder / "latent", num_hidden_layers=4),
    }


def check(ranks: RankPool, path: Path, world: int, layout: Mapping[str, int], **settings: Any) -> None:
    alone, shared = (
        ranks.run(train_job, str(path), dict(layout), settings, share, world_size=world) for share in ("off", "auto")
    )
    for found, expected in zip(shared, alone, strict=True):
        torch.testing.assert_close(found.losses, expected.losses, rtol=0.0, atol=1e-10)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0.0, atol=1e-10)
        assert_near(found.gradients, expected.gradients, 1e-10)
        assert_near(found.weights, expected.weights, 1e-8)
    assert {run.computed for run in alone} == {1.0} and min(run.computed for run in shared) < 0.7


@pytest.mark.shows(
    "runtime: with shared prefixes computed once, dp, tp, ep and pipelines train as without, to 1e-10 in float64"
)
@pytest.mark.parametrize(("world", "layout"), layouts({2: [{}, {"tp": 2}]}))
def test_dense_layouts_train_as_with_whole_sequences(
    ranks: RankPool, models: Mapping[str, Path], world: int, layout: dict[str, int]
) -> None:
    check(ranks, models["dense"], world, layout)


@pytest.mark.long
def test_recomputed_layers_do_too(ranks: RankPool, models: Mapping[str, Path]) -> None:
    check(ranks, models["dense"], 2, {"tp": 2}, activation_checkpointing="full")


@pytest.mark.parametrize(("world", "layout"), layouts({2: [{"ep": 2}, {"tp": 2, "ep": 2}]}))
def test_experts_on_other_ranks_do_too(
    ranks: RankPool, models: Mapping[str, Path], world: int, layout: dict[str, int]
) -> None:
    losses = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1, "router_sequence_loss_coef": 0.3}
    check(ranks, models["mixture"], world, layout, model="qwen3_moe", model_cfg=losses)


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("zb-h1", 1), ("zbv", 2)])
def test_pipelines_do_too(ranks: RankPool, models: Mapping[str, Path], schedule: str, vpp: int) -> None:
    check(ranks, models["dense"], 2, {"pp": 2, "vpp": vpp}, pipeline_schedule=schedule)


@pytest.mark.parametrize(
    ("model", "layout"),
    sampled(
        [(model, layout) for model in ("recurrent", "latent") for layout in ({"tp": 2, "ep": 2}, {"pp": 2})],
        *(("recurrent", {"tp": 2, "ep": 2}), ("latent", {"pp": 2})),
    ),
    ids=str,
)
def test_states_and_latents_do_too(ranks: RankPool, models: Mapping[str, Path], model: str, layout: dict[str, int]) -> None:
    check(ranks, models[model], 2, layout)
