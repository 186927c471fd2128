"""Training state of the bridge runtime, in one layout and from one to another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import CheckpointError, OptimizerConfig
from rl_backend.runtime.bridge.engine import sharding
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import exported, optimizer_shards, train_bridge
from tests.support.critic import squared_error
from tests.support.native import assert_equal_tensors, assert_near, open_runtime
from tests.support.rank_pool import RankPool

STEPS = 3


def state_job(model: str, layout: dict[str, int]) -> list[Mapping[str, Tensor]]:
    """Both moments after two steps."""
    with open_bridge(model, layout) as runtime:
        policy = runtime.build_model()
        train_bridge(runtime, policy, 2)
        state = runtime.get_optimizer_state(policy)
        assert state.step == 2 and state.exp_avg.keys() == {info.name for info in runtime.weight_infos(policy)}
        return [state.exp_avg, state.exp_avg_sq]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_every_rank_gets_the_whole_state_of_an_optimizer(ranks: RankPool, tied_model: Path, layout: dict[str, int]) -> None:
    expected = ranks.run(state_job, str(tied_model), {}, world_size=1)[0]
    for found in ranks.run(state_job, str(tied_model), layout, world_size=2):
        for mine, other in zip(found, expected, strict=True):
            # The second step's gradients follow from updates that Adam made of rounding where gradients are near 0.
            assert_near(mine, other, 1e-4)


def resume_job(model: str, path: str, layout: dict[str, int], settings: dict[str, Any], asynchronous: bool) -> None:
    """Trains on from a checkpoint, in another handle, next to the handle that wrote it."""
    with open_bridge(model, layout, **settings) as runtime:
        saved = runtime.build_model()
        train_bridge(runtime, saved, 2)
        runtime.save_checkpoint(saved, path, asynchronous=asynchronous)
        version, shards, random_state = saved.weight_version, optimizer_shards(saved), torch.get_rng_state()
        norms = train_bridge(runtime, saved, STEPS, seed=10)
        resumed = runtime.build_model()
        runtime.wait_for_checkpoint(saved)
        train_bridge(runtime, resumed, 1, seed=20)
        torch.rand(3)
        runtime.load_checkpoint(resumed, path)
        assert resumed.weight_version == version == 2
        assert not resumed.has_gradients
        assert torch.equal(torch.get_rng_state(), random_state)
        assert_equal_tensors(optimizer_shards(resumed), shards)
        assert train_bridge(runtime, resumed, STEPS, seed=10) == norms
        assert_equal_tensors(exported(runtime, resumed), exported(runtime, saved))
        assert_equal_tensors(optimizer_shards(resumed), optimizer_shards(saved))


@pytest.mark.shows("bridge: a run resumes bit for bit from its checkpoint, even one written in the background")
@pytest.mark.parametrize(
    ("world_size", "layout", "settings", "asynchronous"),
    [
        (1, {}, {"param_dtype": "bfloat16"}, True),
        (2, {}, {}, True),
        (2, {"tp": 2}, {"param_dtype": "bfloat16"}, False),
        (2, {"pp": 2}, {}, False),
    ],
    ids=str,
)
def test_a_run_resumes_bit_for_bit(
    ranks: RankPool,
    tied_model: Path,
    tmp_path: Path,
    world_size: int,
    layout: dict[str, int],
    settings: dict[str, Any],
    asynchronous: bool,
) -> None:
    path = str(tmp_path / "checkpoint")
    ranks.run(resume_job, str(tied_model), path, layout, settings, asynchronous, world_size=world_size)


def schedule_job(model: str, path: str) -> None:
    config = OptimizerConfig(lr=1e-3, lr_warmup_steps=4, lr_decay_style="cosine", total_training_steps=20)
    with open_bridge(model, optimizer=config) as runtime:
        saved, resumed = runtime.build_model(name="saved"), runtime.build_model(name="resumed")
        train_bridge(runtime, saved, 1)
        for _ in range(2):
            runtime.lr_scheduler_step(saved)
        runtime.save_checkpoint(saved, path)
        runtime.load_checkpoint(resumed, path)
        assert saved.optimizer is not None and resumed.optimizer is not None
        assert resumed.optimizer.learning_rate == saved.optimizer.learning_rate != 1e-3
        rates = [[runtime.lr_scheduler_step(handle) for _ in range(4)] for handle in (saved, resumed)]
        assert rates[0] == rates[1]
        assert len(set(rates[0])) == 4


def test_a_schedule_goes_on_where_it_was(ranks: RankPool, tied_model: Path, tmp_path: Path) -> None:
    ranks.run(schedule_job, str(tied_model), str(tmp_path / "checkpoint"), world_size=1)


def critic_job(model: str, path: str) -> None:
    with open_bridge(model, {"pp": 2}) as runtime:
        critic = runtime.build_model(head="values")
        train_bridge(runtime, critic, 1, loss=squared_error)
        runtime.save_checkpoint(critic, path)
        other = runtime.build_model(head="values")
        runtime.load_checkpoint(other, path)
        assert_equal_tensors(exported(runtime, other), exported(runtime, critic))
        policy = runtime.build_model()
        before = exported(runtime, policy)
        with pytest.raises(CheckpointError, match="head='values'"):
            runtime.load_checkpoint(policy, path)
        assert_equal_tensors(exported(runtime, policy), before)


def test_a_critic_is_loaded_into_a_critic_only(ranks: RankPool, untied_model: Path, tmp_path: Path) -> None:
    ranks.run(critic_job, str(untied_model), str(tmp_path / "checkpoint"))


def refusals_job(model: str, folder: str) -> str:
    path = Path(folder, "bridge")
    with open_bridge(model) as bridge:
        handle = bridge.build_model()
        train_bridge(bridge, handle, 1)
        bridge.save_checkpoint(handle, path)
        with pytest.raises(CheckpointError) as caught:
            bridge.load_checkpoint(handle, Path(model))
        with pytest.raises(CheckpointError, match="exists"):
            bridge.save_checkpoint(handle, path)
    return str(caught.value)


def test_a_hugging_face_directory_is_no_checkpoint(ranks: RankPool, tied_model: Path, tmp_path: Path) -> None:
    (message,) = ranks.run(refusals_job, str(tied_model), str(tmp_path), world_size=1)
    assert "Hugging Face directory" in message


def masters_job(model: str, folder: str) -> None:
    """From float32 to bfloat16 and back: the masters are what is kept."""
    first, second = Path(folder, "first"), Path(folder, "second")
    with open_bridge(model) as bridge:
        handle = bridge.build_model()
        train_bridge(bridge, handle, 2)
        bridge.save_checkpoint(handle, first)
        weights = exported(bridge, handle)
    with open_bridge(model, param_dtype="bfloat16") as bridge:
        handle, reference = bridge.build_model(), bridge.build_model(forward_only=True)
        for each in (handle, reference):
            bridge.load_checkpoint(each, first)
            assert_equal_tensors(exported(bridge, each), {name: each.bfloat16() for name, each in weights.items()})
        bridge.save_checkpoint(handle, second)
    with open_bridge(model) as bridge:
        handle = bridge.build_model()
        bridge.load_checkpoint(handle, second)
        assert_equal_tensors(exported(bridge, handle), weights)


def test_a_checkpoint_is_of_the_masters_whatever_the_dtype_of_the_weights(
    ranks: RankPool, tied_model: Path, tmp_path: Path
) -> None:
    ranks.run(masters_job, str(tied_model), str(tmp_path), world_size=2)


def private_job(model: str, path: str, layout: dict[str, int], save: bool) -> dict[str, Tensor]:
    """With conversions that do not only put rows in another order, as far as the runtime knows."""
    with pytest.MonkeyPatch.context() as patch, open_bridge(model, layout) as runtime:
        patch.setattr(sharding, "_AS_THEY_ARE", ())
        handle = runtime.build_model()
        if save:
            train_bridge(runtime, handle, 2)
            runtime.save_checkpoint(handle, path)
        else:
            runtime.load_checkpoint(handle, path)
        return exported(runtime, handle)


def refused_private_job(model: str, path: str) -> str:
    with open_runtime(model) as runtime, pytest.raises(CheckpointError) as caught:
        runtime.load_checkpoint(runtime.build_model(), path)
    return str(caught.value)


def test_weights_without_a_place_among_hugging_faces_go_from_layout_to_layout_of_the_bridge_alone(
    ranks: RankPool, tied_model: Path, tmp_path: Path
) -> None:
    model, path = str(tied_model), str(tmp_path / "saved")
    (saved, _), (loaded, _) = (
        ranks.run(private_job, model, path, layout, save) for layout, save in (({"tp": 2}, True), ({"pp": 2}, False))
    )
    assert_equal_tensors(loaded, saved)
    (message,) = ranks.run(refused_private_job, model, path, world_size=1)
    assert "was written by the bridge runtime, which has model." in message
    assert "load it with backend='bridge'" in message
