"""Random states that are loaded into another layout than they were saved in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from tests.support.bridge_runs import open_bridge
from tests.support.checkpoint_layouts import Layout, bridge, native
from tests.support.native import assert_equal_tensors
from tests.support.rank_pool import RankPool


def save_job(layout: Layout, model: str, path: str) -> Tensor:
    """Saves where every rank, those of one replica too, is at another place of its stream; what comes next there."""
    with layout.open(model) as runtime:
        handle = runtime.build_model()
        torch.rand(1 + dist.get_rank())
        runtime.save_checkpoint(handle, path)
        return torch.rand(4)


def load_job(layout: Layout, model: str, path: str) -> tuple[Tensor, Tensor]:
    """What a new runtime draws next, with and without the checkpoint."""
    with layout.open(model) as runtime:
        handle = runtime.build_model()
        before = torch.get_rng_state()
        fresh = torch.rand(4)
        torch.set_rng_state(before)
        runtime.load_checkpoint(handle, path)
        return torch.rand(4), fresh


@pytest.mark.shows("checkpoints: after a change of layout all ranks of a replica draw the same random numbers")
@pytest.mark.parametrize(
    ("saver", "loader", "sources"),
    [
        (native(2), native(2, tp=2), [0, 0]),
        (native(2, tp=2), native(2), [0, None]),
        (native(2, pp=2), native(2, pp=2), [0, 1]),
        (native(4, pp=2), native(4, tp=2), [0, 0, 1, 1]),
        (bridge(4, tp=2), native(4, cp=2), [0, 0, 2, 2]),
        (native(2), bridge(2, tp=2), [0, 0]),
    ],
    ids=str,
)
def test_ranks_of_a_replica_continue_one_saved_stream(
    ranks: RankPool, tied_model: Path, tmp_path: Path, saver: Layout, loader: Layout, sources: list[int | None]
) -> None:
    model, path = str(tied_model), str(tmp_path / "saved")
    saved = ranks.run(save_job, saver, model, path, world_size=saver.world_size)
    loaded = ranks.run(load_job, loader, model, path, world_size=loader.world_size)
    for source, (found, fresh) in zip(sources, loaded, strict=True):
        assert torch.equal(found, fresh if source is None else saved[source])


def tracked_job(model: str, layout: dict[str, int], path: str, load: bool) -> dict[str, Tensor]:
    """Megatron's streams after a save at a place where no two ranks are, or after loading it."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from rl_backend.runtime.bridge.megatron.cpu import on_cpu

    with open_bridge(model, layout) as runtime:
        handle = runtime.build_model()
        if load:
            runtime.load_checkpoint(handle, path)
        with on_cpu(runtime.engine.groups.device):
            tracker = get_cuda_rng_tracker()
            if not load:
                for name in tracker.get_states():
                    with tracker.fork(name):
                        torch.rand(1 + dist.get_rank())
        if not load:
            runtime.save_checkpoint(handle, path)
        return {name: torch.as_tensor(state).clone() for name, state in tracker.get_states().items()}


def test_megatrons_streams_differ_between_tensor_parallel_ranks_in_every_layout(
    ranks: RankPool, tied_model: Path, tmp_path: Path
) -> None:
    def run(layout: dict[str, int], path: Path, load: bool, world_size: int) -> list[dict[str, Tensor]]:
        return ranks.run(tracked_job, str(tied_model), layout, str(path), load, world_size=world_size)

    tensor, data = "model-parallel-rng", "data-parallel-rng"
    saved = run({}, tmp_path / "dp2", False, 2)
    first, second = run({"tp": 2}, tmp_path / "dp2", True, 2)
    assert not torch.equal(first[tensor], second[tensor])
    assert torch.equal(first[data], saved[0][data])
    assert torch.equal(second[data], saved[0][data])
    saved = run({"tp": 2}, tmp_path / "tp2", False, 2)
    for rank, found in enumerate(run({"tp": 2}, tmp_path / "tp2", True, 4)):
        assert torch.equal(found[tensor], saved[rank % 2][tensor])


def moved_job(model: str, path: str, prefix: str, size: int) -> list[dict[str, Tensor]]:
    """Megatron's streams when they are saved as ``prefix`` with ``size`` bytes each, before loading that, and after."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from rl_backend.runtime.bridge.engine import engine
    from rl_backend.runtime.bridge.megatron.cpu import on_cpu

    state_here = engine._random_state

    def state_there(handle: BridgeHandle) -> dict[str, Tensor]:
        here, there = "random.megatron.cpu.", dict[str, Tensor]()
        for name, value in state_here(handle).items():
            there[name.replace(here, prefix)] = value[:size].clone() if name.startswith(here) else value
        return there

    with open_bridge(model) as runtime:
        handle = runtime.build_model()
        tracker = get_cuda_rng_tracker()

        def drawn() -> dict[str, Tensor]:
            with on_cpu(runtime.engine.groups.device):
                for name in tracker.get_states():
                    with tracker.fork(name):
                        torch.rand(3)
            return {name: torch.as_tensor(state).clone() for name, state in tracker.get_states().items()}

        saved = drawn()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_random_state", state_there)
            runtime.save_checkpoint(handle, path)
        before = drawn()
        runtime.load_checkpoint(handle, path)
        return [saved, before, dict(tracker.get_states())]


@pytest.mark.shows("bridge: a checkpoint loads on another kind of device, where random states have another size")
@pytest.mark.parametrize(
    ("prefix", "size", "continues"),
    [
        ("random.megatron.cpu.", 5056, True),
        ("random.megatron.cuda.", 16, False),
        ("random.megatron.", 5056, True),
        ("random.megatron.", 16, False),
    ],
    ids=["cpu", "cuda", "older-cpu", "older-cuda"],
)
def test_megatrons_streams_continue_on_their_own_kind_of_device_alone(
    ranks: RankPool, tied_model: Path, tmp_path: Path, prefix: str, size: int, continues: bool
) -> None:
    (found,) = ranks.run(moved_job, str(tied_model), str(tmp_path / "saved"), prefix, size, world_size=1)
    saved, before, loaded = found
    assert_equal_tensors(loaded, saved if continues else before)
    assert all(not torch.equal(before[name], saved[name]) for name in saved)
