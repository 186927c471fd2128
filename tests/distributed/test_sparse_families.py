"""DeepSeek-V3.2 and GLM-5 in layouts of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_native_layouts import Run, assert_same, train_job, whole
from tests.support.indexed_keys import first_keys, with_keys
from tests.support.native import assert_near, micro_batches, open_runtime, token_loss
from tests.support.rank_pool import RankPool
from tests.support.sparse_models import write_sparse

FROZEN: list[tuple[int, dict[str, int]]] = [(2, {"tp": 2}), (2, {"cp": 2}), (4, {"tp": 2, "cp": 2, "ep": 2}), (2, {"pp": 2})]


def job(model: str, family: str, layout: Mapping[str, int], options: Mapping[str, Any]) -> Run:
    # Of gradients that are rounding Adam makes no whole steps then.
    return train_job(model, layout, {"model": family, "model_cfg": dict(options)}, {"eps": 1e-4})


@pytest.fixture(scope="module", params=["glm_moe_dsa", pytest.param("deepseek_v32", marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("sparse") / request.param, request.param, vocab_size=131)


@pytest.mark.shows("sparse attention: DeepSeek-V3.2 and GLM-5 with tp, cp, ep, pp train as on one rank to 1e-5")
@pytest.mark.long
def test_layouts_train_as_one_rank(ranks: RankPool, model: Path) -> None:
    expected = whole(ranks.run(job, str(model), model.name, {}, {}, world_size=1))
    for world, layout in FROZEN:
        assert_same(whole(ranks.run(job, str(model), model.name, layout, {}, world_size=world)), expected)


@pytest.mark.shows("sparse attention: indexers are trained with dp, ep and pp as on one rank to 1e-5")
def test_indexers_are_trained_as_on_one_rank(ranks: RankPool, model: Path) -> None:
    options = {"indexer": "sparse"}
    expected = whole(ranks.run(job, str(model), model.name, {}, options, world_size=1))
    for world, layout in ((2, {"ep": 2}), (2, {"pp": 2})):
        assert_same(whole(ranks.run(job, str(model), model.name, layout, options, world_size=world)), expected)


def keys_job(model: str, layout: Mapping[str, int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs, on the ranks that have them, and gradients of a pass over recorded keys, which no indexer would choose."""
    with open_runtime(model, parallel=dict(layout)) as runtime:
        handle = runtime.build_model()
        indexed = handle.indexed_layers
        assert indexed is not None
        data = [
            with_keys(batch, first_keys(batch, len(indexed.layers), indexed.top_k))
            for batch in micro_batches([range(4), range(4, 8)])
        ]
        result = runtime.forward_backward(handle, data, token_loss)
        gradients = {name: value.clone() for name, value in runtime.export_gradients(handle)}
        return list(result.output("log_probs")) if result.outputs else [], gradients


@pytest.mark.shows("sparse attention: recorded keys are attended to with tp, cp and pp as on one rank to 1e-5")
@pytest.mark.long
def test_recorded_keys_are_attended_to_in_layouts(ranks: RankPool, model: Path) -> None:
    log_probs, gradients = ranks.run(keys_job, str(model), {}, world_size=1)[0]
    for layout in ({"tp": 2}, {"cp": 2}, {"pp": 2}):
        for found, of_weights in ranks.run(keys_job, str(model), layout, world_size=2):
            for one, other in zip(found, log_probs, strict=False):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
            assert_near(of_weights, gradients)
