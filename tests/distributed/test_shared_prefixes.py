"""Shared prefixes computed once: every mixer and kind of router trains in every layout as it does without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import TokenSequence
from rl_backend.data import pack, prefixes
from tests.support.deepseek import write_latent
from tests.support.drafting import write_drafting
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import assert_near, full, gradients, open_in_float64, token_loss
from tests.support.qwen3_5 import write_qwen3_next
from tests.support.random_trees import sequences_of_a_tree
from tests.support.rank_pool import RankPool
from tests.support.sparse_models import write_sparse
from tests.support.variants import write_variant

STEPS = 3
LOSSES = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1, "router_sequence_loss_coef": 0.3}
BALANCED = {**LOSSES, "expert_bias_rate": 0.1}
MODELS: Mapping[str, tuple[str, Callable[[Path], Path], Mapping[str, Any]]] = {
    "full": ("qwen3", partial(write_tiny, "qwen3", num_hidden_layers=4), {}),
    "sliding": ("starcoder2", partial(write_variant, "starcoder2", num_hidden_layers=4, sliding_window=6), {}),
    # Its router weights what it has chosen; the next one's scores all experts, with a softmax.
    "sinks": ("gpt_oss", partial(write_moe, "gpt_oss", num_hidden_layers=4, sliding_window=6), LOSSES),
    "mixture": ("qwen3_moe", partial(write_moe, "qwen3_moe", num_hidden_layers=4), LOSSES),
    # Routers of sigmoids, in groups, with biases that balance loads.
    "latent": ("deepseek_v3", partial(write_latent, "deepseek_v3", num_hidden_layers=4), BALANCED),
    "sparse": ("deepseek_v32", partial(write_sparse, model_type="deepseek_v32"), BALANCED),
    "recurrent": ("qwen3_next", write_qwen3_next, LOSSES),
    # Its layer for multi-token prediction has whole sequences, beside others that share.
    "second": (
        "glm4_moe",
        partial(write_drafting, model_type="glm4_moe", num_hidden_layers=4),
        {**BALANCED, "mtp": "joint"},
    ),
}
"""The family of each, how it is written, and what its routers learn beside the loss."""
LAYOUTS: Mapping[str, tuple[int, Mapping[str, int], Mapping[str, Any]]] = {
    "one-rank": (1, {}, {}),
    "dp2": (2, {}, {}),
    "tp2": (2, {"tp": 2}, {}),
    "tp2-recomputed": (2, {"tp": 2}, {"activation_checkpointing": "full"}),
    "ep2": (2, {"ep": 2}, {}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}, {}),
    "1f1b": (2, {"pp": 2}, {}),
    "zb-h1": (2, {"pp": 2}, {"pipeline_schedule": "zb-h1"}),
    "zbv": (2, {"pp": 2, "vpp": 2}, {"pipeline_schedule": "zbv"}),
    "cp2": (2, {"cp": 2}, {}),
}
"""Ranks, sizes and other settings."""
CELLS = [
    (model, layout)
    for model, (_, _, options) in MODELS.items()
    for layout, (_, parallel, _) in LAYOUTS.items()
    if (options or "ep" not in parallel) and "cp" not in parallel
]
QUICK = (
    *(("full", "dp2"), ("full", "zbv"), ("sinks", "zb-h1"), ("mixture", "ep2")),
    *(("latent", "1f1b"), ("recurrent", "tp2-ep2"), ("second", "tp2-ep2")),
)


class Run(NamedTuple):
    losses: list[float]
    log_probs: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    computed: float  # tokens, for one of the batch; 0 where they are not counted


def train_job(path: str, model: str, layout: str) -> list[Run]:
    """Without and with sharing."""
    before, prefixes.SHORTEST_RUN = prefixes.SHORTEST_RUN, 1
    try:
        return [train(path, model, layout, share) for share in ("off", "auto")]
    finally:
        prefixes.SHORTEST_RUN = before


def train(path: str, model: str, layout: str, share: str) -> Run:
    (family, _, options), (_, parallel, settings) = MODELS[model], LAYOUTS[layout]
    given = {"model": family, "model_cfg": dict(options), "parallel": dict(parallel), "share_prefixes": share}
    with open_in_float64(path, **given, **settings) as runtime:
        handle = runtime.build_model()
        batches = []
        for micro_batch in range(4):
            rows = [
                TokenSequence(
                    ids,
                    {"loss_mask": (torch.arange(len(ids)) < len(ids) - 1).double()},
                    {"temperature": torch.tensor((0.7, 1.3)[place % 2])},
                )
                for place, ids in enumerate(sequences_of_a_tree(10 * handle.data_parallel_rank + micro_batch))
            ]
            batches.append(pack(rows, {"batch_num_tokens": 100.0, "dp_size": handle.data_parallel_size}))
        run = Run([], [], {}, {}, 0.0)
        for step in range(STEPS):
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, batches, token_loss)
            if step == 0:
                run = run._replace(log_probs=list(result.outputs.get("log_probs", [])), gradients=gradients(handle))
                if "tokens_computed" in result.metrics:
                    run = run._replace(computed=result.metrics["tokens_computed"].mean)
            assert runtime.optimizer_step(handle).ok
            run.losses.append(result.loss)
        return run._replace(weights={name: full(value) for name, value in handle.parameters.items()})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, found = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def write(model: str) -> Path:
        if model not in found:
            found[model] = MODELS[model][1](folder / model)
        return found[model]

    return write


@pytest.mark.shows(
    "runtime: with shared prefixes computed once, every mixer and kind of router trains as without: dp, tp, ep, pipelines, "
    "recomputed layers; to 1e-10 in float64"
)
@pytest.mark.parametrize(("model", "layout"), sampled(CELLS, *QUICK))
def test_layouts_train_as_with_whole_sequences(
    ranks: RankPool, written: Callable[[str], Path], model: str, layout: str
) -> None:
    found = ranks.run(train_job, str(written(model)), model, layout, world_size=LAYOUTS[layout][0])
    for alone, shared in found:
        torch.testing.assert_close(shared.losses, alone.losses, rtol=0.0, atol=1e-10)
        torch.testing.assert_close(shared.log_probs, alone.log_probs, rtol=0.0, atol=1e-10)
        assert_near(shared.gradients, alone.gradients, 1e-10)
        assert_near(shared.weights, alone.weights, 1e-8)
        assert alone.computed == 0.0
    # Of a pipeline only the stage with the loss counts.
    counted = [shared.computed for _, shared in found if shared.computed]
    assert counted and max(counted) < 1.0 and min(counted) < 0.7


@pytest.mark.shows("runtime: ranks with context parallelism compute every sequence by itself, as tokens_computed says")
def test_context_parallelism_computes_whole_sequences(ranks: RankPool, written: Callable[[str], Path]) -> None:
    for alone, shared in ranks.run(train_job, str(written("full")), "full", "cp2", world_size=2):
        assert (alone.computed, shared.computed) == (0.0, 1.0) and shared.losses == alone.losses
        for name, weight in shared.weights.items():
            assert torch.equal(weight, alone.weights[name])
