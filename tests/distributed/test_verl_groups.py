"""verl's ``use_prefix_grouper``: groups are computed once, and train as whole sequences do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.models import write_tiny
from tests.support.native import assert_near, gradients, weights
from tests.support.rank_pool import RankPool
from tests.support.verl_batches import GROUPS, grouped_rows, make_batch, ppo, transformers_gradients
from tests.support.verl_engine import mean_loss, open_engine

pytestmark = pytest.mark.long

IMPORT_SECONDS = 300.0
CUT = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 150, "global_batch_size": 8, "calculate_entropy": True}
SUMS = ("actor/pg_loss", "actor/entropy_loss", "kl_loss")
GROUPER = {"use_prefix_grouper": True}
WHOLE = {"backend_options": {"share_prefixes": "off"}}


class Run(NamedTuple):
    log_probs: dict[int, Tensor]  # of each row of the whole batch, at its own temperature, before the first step
    losses: list[float]  # of each step
    sums: dict[str, float]  # those of verl's metrics that are sums over micro-batches, of the first step
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # after the last
    computed: float  # tokens, for one of the batch
    num_micro_batches: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("verl") / "model", num_hidden_layers=4)


def train_job(model: str, layout: dict[str, int], options: dict[str, Any], exact: bool) -> Run:
    from adapters.verl.trainers import rows_of_ranks

    with open_engine(model, layout=layout, exact=exact, **options) as engine:
        found = grouped_rows()
        ranks = rows_of_ranks([str(group) for group in GROUPS], [1.0] * 8, engine.get_data_parallel_size())
        mine = ranks[engine.get_data_parallel_rank()]
        share = [found[row] for row in mine]
        with engine.eval_mode():
            batch = make_batch(share, "response", **CUT)
            batch["temperature"] = torch.stack([row["temperature"] for row in share])
            output = engine.infer_batch(batch)
        log_probs = dict(zip(mine, output["model_output"]["log_probs"].unbind(), strict=True)) if output else {}
        with engine.train_mode():
            output = engine.forward_backward_batch(make_batch(share, "response", **CUT), ppo())
            of_step = gradients(engine.handle)
            exported = {name: value.clone() for name, value in engine._runtime.export_gradients(engine.handle)}
            losses = [mean_loss(engine, output)]
            for _ in range(3):
                losses.append(mean_loss(engine, engine.train_batch(make_batch(share, "response", **CUT), ppo())))
        if not output:
            return Run({}, losses, {}, of_step if exact else exported, weights(engine.handle), 0.0, 0)
        metrics = output["metrics"]
        sums = {name: float(metrics[name].aggregate()) for name in SUMS}
        (computed,) = metrics.get("shared_prefixes/computed_fraction", (1.0,))
        number = len(output["loss"])
        return Run(log_probs, losses, sums, of_step if exact else exported, weights(engine.handle), computed, number)


@pytest.mark.shows(
    "verl: with actor.use_prefix_grouper groups are computed once, and log-probs, losses, gradients and weights are those "
    "of whole sequences to 1e-8 in float64, on one rank and with dp, tp and pp"
)
@pytest.mark.parametrize(
    ("world", "layout", "num_micro_batches"),
    # One of two ranks has groups that need two micro-batches, and the other divides its own; as does a schedule that takes
    # pairs of micro-batches.
    [(1, {}, 3), (2, {}, 2), (2, {"tp": 2}, 3), (2, {"pp": 2, "vpp": 2}, 4)],
    ids=["one-rank", "dp2", "tp2", "pp2"],
)
def test_groups_train_as_whole_sequences(
    ranks: RankPool, model: Path, world: int, layout: dict[str, int], num_micro_batches: int
) -> None:
    given: Mapping[str, Any] = {"world_size": world, "timeout": IMPORT_SECONDS}
    alone, shared = (ranks.run(train_job, str(model), layout, options, True, **given) for options in (WHOLE, GROUPER))
    for found, expected in zip(shared, alone, strict=True):
        assert found.log_probs.keys() == expected.log_probs.keys()
        for row, log_probs in found.log_probs.items():
            torch.testing.assert_close(log_probs, expected.log_probs[row], rtol=0, atol=1e-10)
        # Those of micro-batches are float32.
        assert found.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-6)
        assert found.sums == pytest.approx(expected.sums, rel=1e-8)
        assert_near(found.gradients, expected.gradients, 1e-8)
        assert_near(found.weights, expected.weights, 1e-8)
        if found.log_probs:
            assert found.num_micro_batches == num_micro_batches < expected.num_micro_batches
            assert found.computed < 0.6 and expected.computed == 1


def test_gradients_of_groups_are_those_of_transformers(ranks: RankPool, model: Path) -> None:
    given: Mapping[str, Any] = {"world_size": 1, "timeout": IMPORT_SECONDS}
    (found,) = ranks.run(train_job, str(model), {}, GROUPER, False, **given)
    loss, expected = transformers_gradients(model, grouped_rows(), ppo(), "response")
    assert found.losses[0] == pytest.approx(loss, rel=1e-5)
    assert_near(found.gradients, expected)
