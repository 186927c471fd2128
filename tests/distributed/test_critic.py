"""A critic on several ranks: its head has one row, so that most ranks hold none of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.critic import critic_hf_job, critic_job, critic_layout_job, critic_state_job, write_critic
from tests.support.models import write_tiny
from tests.support.native import (
    assert_equal_tensors,
    assert_near,
    deal,
    open_runtime,
    weights,
)
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.shows("critic: gradients on 2 and 4 ranks equal one rank's; checkpoints load on another number of ranks")
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_and_values_are_those_of_one_rank(
    ranks: RankPool, untied_model: Path, tmp_path: Path, world_size: int
) -> None:
    path = str(write_critic(tmp_path / "critic", untied_model))
    expected, values = critic_job(path, [SPLIT], {})
    split = deal(SPLIT, world_size)
    results = ranks.run(critic_job, path, split, {"activation_checkpointing": "full"}, world_size=world_size)
    for rank, (gradients, found) in enumerate(results):
        assert_near(gradients, expected)
        mine = [index for indices in split[rank] for index in indices]
        for index, row in zip(mine, found, strict=True):
            torch.testing.assert_close(row, values[index], atol=1e-5, rtol=0)


@pytest.mark.shows("critic: values and gradients of every layout and of schedules that split backward equal one rank's")
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ({"tp": 2, "cp": 2}, None),
        ({"tp": 4}, None),
        ({"pp": 2, "tp": 2}, None),
        ({"pp": 2, "vpp": 2}, None),
        *(({"pp": 2}, schedule) for schedule in ("zb-h1", "zb-h2")),
        ({"pp": 2, "vpp": 2}, "zbv"),
    ],
    ids=str,
)
def test_a_critic_trains_in_every_layout_as_on_one_rank(
    ranks: RankPool, tmp_path: Path, layout: dict[str, int], schedule: str | None
) -> None:
    policy = write_tiny("qwen3", tmp_path / "policy", num_hidden_layers=4)
    path = str(write_critic(tmp_path / "critic", policy))
    ((expected, values),) = ranks.run(critic_layout_job, path, {}, world_size=1)
    results = ranks.run(critic_layout_job, path, layout, schedule, world_size=4)
    found: dict[int, torch.Tensor] = {}
    for gradients, rows in results:
        assert_near(gradients, expected)
        found.update(rows)
    assert found.keys() == values.keys()
    for index, row in found.items():
        torch.testing.assert_close(row, values[index], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (4, 1), (1, 4)])
def test_a_critics_checkpoint_continues_on_any_number_of_ranks(
    ranks: RankPool, tied_model: Path, tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    path = str(tmp_path / "saved")
    saved, curve = ranks.run(critic_state_job, str(tied_model), path, False, world_size=saved_by)[0]
    for state, continued in ranks.run(critic_state_job, str(tied_model), path, True, world_size=loaded_by):
        assert_equal_tensors(state, saved)
        torch.testing.assert_close(torch.tensor(continued), torch.tensor(curve), rtol=1e-4, atol=0)


def test_a_critic_saved_by_several_ranks_is_whole(ranks: RankPool, tied_model: Path, tmp_path: Path) -> None:
    ranks.run(critic_hf_job, str(tied_model), str(tmp_path / "critic"), world_size=4)
    with open_runtime(tmp_path / "critic") as runtime:
        loaded = weights(runtime.build_model(head="values"))
    assert bool((loaded["score.weight"] != 0).all()) and bool((loaded["score.bias"] != 0).all())
