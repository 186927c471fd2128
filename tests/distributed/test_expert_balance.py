"""Loss-free balancing over ranks: loads are those of one rank, and a step that is taken back takes biases with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.bridge_runs import poisoned_loss
from tests.support.deepseek import write_latent
from tests.support.native import assert_equal_tensors, deal, micro_batches, open_runtime, token_loss
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]
STEPS = 4
REFUSED = 2
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "dp2 ep2": (2, {"ep": 2}, {}),
    "tp2 cp2 recomputed": (4, {"tp": 2, "cp": 2}, {"activation_checkpointing": "full"}),
    "pp2 zbv": (2, {"pp": 2, "vpp": 2}, {"pipeline_schedule": "zbv"}),
    "pp2 dp2": (4, {"pp": 2}, {}),
    "dp4 etp2": (4, {"etp": 2}, {}),
}
QUICK = ("dp2 ep2", "pp2 zbv")


class Balanced(NamedTuple):
    """Attributes:
    biases: after each step, by Hugging Face name.
    taken: which of the steps were.
    """

    biases: list[dict[str, Tensor]]
    taken: list[bool]


def balance_job(model: str, layout: dict[str, int], settings: dict[str, Any]) -> Balanced:
    options = {"model": "deepseek_v3", "model_cfg": {"expert_bias_rate": 0.01}, "parallel": layout, **settings}
    biases, taken = [], []
    with open_runtime(model, **options) as runtime:
        handle = runtime.build_model()
        for step in range(STEPS):
            size = handle.data_parallel_size
            data = micro_batches(deal(SPLIT, size)[handle.data_parallel_rank], dp_size=size, seed=step)
            runtime.zero_grad(handle)
            runtime.forward_backward(handle, data, poisoned_loss if step == REFUSED else token_loss)
            taken.append(bool(runtime.optimizer_step(handle).ok))
            exported = runtime.export_weights(handle)
            biases.append({name: value.clone() for name, value in exported if name.endswith("e_score_correction_bias")})
    return Balanced(biases, taken)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_latent("deepseek_v3", tmp_path_factory.mktemp("balance") / "model", num_hidden_layers=5))


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, model: str) -> Balanced:
    return ranks.run(balance_job, model, {}, {}, world_size=1)[0]


@pytest.mark.shows(
    "runtime: loss-free balancing with dp, ep, tp, cp, pp moves biases as on one rank, and not in refused steps"
)
@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_biases_move_as_on_one_rank(ranks: RankPool, model: str, one_rank: Balanced, layout: str) -> None:
    world, parallel, settings = LAYOUTS[layout]
    assert one_rank.taken == [step != REFUSED for step in range(STEPS)]
    assert_equal_tensors(one_rank.biases[REFUSED], one_rank.biases[REFUSED - 1])
    assert not torch.equal(*(next(iter(one_rank.biases[step].values())) for step in (0, 1)))
    for found in ranks.run(balance_job, model, parallel, settings, world_size=world):
        assert found.taken == one_rank.taken
        for mine, expected in zip(found.biases, one_rank.biases, strict=True):
            assert len(mine) == 4
            assert_equal_tensors(mine, expected)
