"""Loss-free balancing in the bridge: biases move by the rule, once for each step that is taken, alike in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import ConfigError
from rl_backend.runtime.bridge.engine.engine import BridgeRuntime
from tests.support.bridge_runs import open_bridge, poisoned_loss
from tests.support.bridge_state import SPLIT, bridge_data, exported
from tests.support.models import write_tiny
from tests.support.native import assert_equal_tensors, deal, micro_batches, token_loss
from tests.support.rank_pool import RankPool
from tests.support.released_mixtures import write_mixture

RATE = 0.01
STEPS = 3
REFUSED = 1
BALANCED: Mapping[str, Any] = {"expert_bias_rate": RATE}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Balanced(NamedTuple):
    """Attributes:
    biases: after each step, by Hugging Face name.
    taken: which of the steps were.
    """

    biases: list[dict[str, Tensor]]
    taken: list[bool]


def biases_of(runtime: BridgeRuntime, handle: Any) -> dict[str, Tensor]:
    return {name: value for name, value in exported(runtime, handle).items() if name.endswith("e_score_correction_bias")}


def balance_job(model: str, layout: dict[str, int], settings: dict[str, Any]) -> Balanced:
    found = Balanced([], [])
    with open_bridge(model, layout, **BALANCED, **settings) as runtime:
        handle = runtime.build_model()
        for step in range(STEPS):
            size = handle.data_parallel_size
            data = micro_batches(deal(SPLIT, size)[handle.data_parallel_rank], dp_size=size, seed=step)
            runtime.zero_grad(handle)
            runtime.forward_backward(handle, data, None, forward_only=True)
            runtime.forward_backward(handle, data, poisoned_loss if step == REFUSED else token_loss)
            found.taken.append(bool(runtime.optimizer_step(handle).ok))
            found.biases.append(biases_of(runtime, handle))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("balance")
    # As many layers as two stages of two.
    return str(write_mixture(path, "deepseek_v3", hidden_size=64, num_hidden_layers=4))


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, model: str) -> Balanced:
    return ranks.run(balance_job, model, {}, {}, world_size=1)[0]


@pytest.mark.shows("bridge: loss-free balancing with dp, ep, pp moves biases as on one rank, and not in refused steps")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [({"ep": 2}, {}), ({"pp": 2}, {}), pytest.param({}, RECOMPUTED, marks=pytest.mark.long)],
    ids=["ep2", "pp2", "dp2 recomputed"],
)
def test_biases_move_as_on_one_rank(
    ranks: RankPool, model: str, one_rank: Balanced, layout: dict[str, int], settings: dict[str, Any]
) -> None:
    assert one_rank.taken == [step != REFUSED for step in range(STEPS)]
    assert_equal_tensors(one_rank.biases[REFUSED], one_rank.biases[REFUSED - 1])
    for found in ranks.run(balance_job, model, layout, settings):
        assert found.taken == one_rank.taken
        for mine, expected in zip(found.biases, one_rank.biases, strict=True):
            assert len(mine) == 3
            assert_equal_tensors(mine, expected)


def rule_job(model: str, path: str, dtype: str) -> None:
    """Against counts of recorded routes; then through a checkpoint."""
    with open_bridge(model, param_dtype=dtype, **BALANCED) as runtime:
        handle = runtime.build_model()
        routed = handle.routed_layers
        assert routed is not None
        expected = list(biases_of(runtime, handle).values())
        for step in range(2):
            runtime.zero_grad(handle)
            counts = torch.zeros(len(routed.layers), routed.num_experts, dtype=torch.int64)
            for data in (bridge_data(runtime, step), bridge_data(runtime, step + 9)):
                result = runtime.forward_backward(handle, data, token_loss, router_replay="record")
                for routes in result.output("routed_experts"):
                    for layer in range(len(routed.layers)):
                        counts[layer] += routes[:, layer].long().flatten().bincount(minlength=routed.num_experts)
            assert runtime.optimizer_step(handle).ok
            mean = counts.float().mean(-1, keepdim=True)
            expected = [old + RATE * sign for old, sign in zip(expected, (mean - counts).sign(), strict=True)]
            found = biases_of(runtime, handle)
            for own, by_rule in zip(found.values(), expected, strict=True):
                assert own.dtype == torch.float32
                torch.testing.assert_close(own, by_rule, rtol=0.0, atol=1e-6)
        runtime.save_checkpoint(handle, path)
        resumed = runtime.build_model(name="resumed")
        runtime.load_checkpoint(resumed, path)
        assert_equal_tensors(biases_of(runtime, resumed), found)
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, bridge_data(runtime), token_loss)
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, bridge_data(runtime, 5), token_loss)
        runtime.zero_grad(resumed)
        runtime.forward_backward(resumed, bridge_data(runtime, 5), token_loss)
        for each in (handle, resumed):
            assert runtime.optimizer_step(each).ok
        assert_equal_tensors(biases_of(runtime, handle), biases_of(runtime, resumed))


@pytest.mark.shows(
    "bridge: biases of routers move by the published rule, in float32, over all passes of a step; saved, resumed"
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_biases_move_by_the_rule(ranks: RankPool, model: str, tmp_path: Path, dtype: str) -> None:
    ranks.run(rule_job, model, str(tmp_path / "saved"), dtype, world_size=1)


def without_rate_job(model: str) -> None:
    with open_bridge(model) as runtime:
        handle = runtime.build_model()
        before = biases_of(runtime, handle)
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, bridge_data(runtime), token_loss)
        assert runtime.optimizer_step(handle).ok
        assert_equal_tensors(biases_of(runtime, handle), before)


def test_biases_stay_as_they_are_by_default(ranks: RankPool, model: str) -> None:
    ranks.run(without_rate_job, model, world_size=1)


def refused_job(model: str) -> str:
    with open_bridge(model, **BALANCED) as runtime, pytest.raises(ConfigError) as refused:
        runtime.build_model()
    return str(refused.value)


def test_a_rate_is_refused_where_routers_have_no_bias(ranks: RankPool, tmp_path: Path) -> None:
    plain = str(write_tiny("qwen3_moe", tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32))
    assert "expert_bias_rate=0.01: routers of this model have no bias" in ranks.run(refused_job, plain, world_size=1)[0]
