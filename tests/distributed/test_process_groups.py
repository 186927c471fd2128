"""Who makes process groups, and who destroys them."""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_backend.contracts import ParallelConfig, RuntimeConfig
from rl_backend.parallel.groups import COLLECTIVE_TIMEOUT
from rl_backend.runtime import create_runtime
from rl_backend.runtime.native.engine import native_runtime
from tests.support.native import make_config, train
from tests.support.rank_pool import RankPool


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_runtimes_job(model: str, port: int | None) -> tuple[list[bool], int]:
    """Whether there is a default group after each step of two overlapping lives, and the size of the first runtime."""
    if port is None:
        os.environ.pop("WORLD_SIZE")
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        alive = [dist.is_initialized()]
        first = native_runtime(make_config(model))
        second = native_runtime(make_config(model))
        first.close()
        alive.append(dist.is_initialized())
        train(second, second.build_model(), 1)
        second.close()
        alive.append(dist.is_initialized())
        return alive, first.engine.groups.dp_size
    finally:
        os.environ["WORLD_SIZE"] = "1"


def test_a_runtime_makes_the_group_that_the_environment_describes_and_the_last_one_destroys_it(
    ranks: RankPool, tied_model: Path
) -> None:
    for alive, size in ranks.run(two_runtimes_job, str(tied_model), free_port(), init_group=False):
        assert alive == [False, True, False]
        assert size == 2


def test_without_an_environment_a_process_is_a_job_of_its_own(ranks: RankPool, tied_model: Path) -> None:
    ((alive, size),) = ranks.run(two_runtimes_job, str(tied_model), None, init_group=False, world_size=1)
    assert alive == [False, True, False]
    assert size == 1


def timeouts_job(model: str, backend: str, folder: str, port: int, options: dict[str, Any]) -> set[timedelta]:
    """Of all process groups of several ranks that a runtime makes, also for what is written in the background."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    runtime = create_runtime(RuntimeConfig(hf_path=model, backend=backend, backend_cfg={"device": "cpu", **options}))
    handle = runtime.build_model()
    runtime.save_checkpoint(handle, Path(folder) / backend, asynchronous=True)
    runtime.wait_for_checkpoint(handle)
    groups = dist.distributed_c10d._world.pg_map
    # One that Megatron makes with torch's own limit; our checkpoints do not use it.
    megatrons = "EXPERT_DATA_PARALLEL_GROUP_GLOO"
    several = (group for group in groups if group.size() > 1 and group.group_desc != megatrons)
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in several}
    runtime.close()
    return timeouts


@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_all_collectives_wait_as_long_for_a_slow_rank_as_the_configuration_says(
    ranks: RankPool, tied_model: Path, tmp_path: Path, backend: str
) -> None:
    for options, expected in ({}, COLLECTIVE_TIMEOUT), ({"collective_timeout": 77.5}, timedelta(seconds=77.5)):
        folder = str(tmp_path / str(len(options)))
        found = ranks.run(timeouts_job, str(tied_model), backend, folder, free_port(), options, init_group=False)
        assert found == [{expected}] * 2


def failing_group_job() -> list[bool]:
    """Whether Megatron's groups and the default group are there after a failure to make the last group."""
    from megatron.core import parallel_state

    from rl_backend.runtime.bridge.megatron import groups

    os.environ.pop("WORLD_SIZE")
    new_group = dist.new_group

    def fails(*arguments: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code is groups.open_groups.__code__:
            raise RuntimeError("no port is left")
        return new_group(*arguments, **options)

    dist.new_group = fails
    try:
        with pytest.raises(RuntimeError, match="no port is left"):
            groups.open_groups(ParallelConfig(), torch.device("cpu"))
        dist.new_group = new_group
        left = [parallel_state.is_initialized(), dist.is_initialized()]
        for _ in range(2):
            groups.close_groups(groups.open_groups(ParallelConfig(), torch.device("cpu")))
            left += [parallel_state.is_initialized(), dist.is_initialized()]
        return left
    finally:
        dist.new_group = new_group
        os.environ["WORLD_SIZE"] = "1"


def test_groups_of_the_bridge_that_were_not_all_made_are_left(ranks: RankPool) -> None:
    assert ranks.run(failing_group_job, init_group=False, world_size=1) == [[False] * 6]


def foreign_group_job(model: str) -> bool:
    runtime = native_runtime(make_config(model))
    runtime.close()
    dist.barrier()
    return dist.is_initialized()


def test_a_group_that_somebody_else_made_is_left_alone(ranks: RankPool, tied_model: Path) -> None:
    assert ranks.run(foreign_group_job, str(tied_model)) == [True, True]


def incomplete_environment_job(model: str) -> None:
    os.environ.pop("RANK")
    try:
        with pytest.raises(ValueError, match="environment variable RANK expected"):
            native_runtime(make_config(model))
        assert not dist.is_initialized()
    finally:
        os.environ["RANK"] = "0"


def test_half_of_the_rank_variables_is_refused(ranks: RankPool, tied_model: Path) -> None:
    ranks.run(incomplete_environment_job, str(tied_model), init_group=False, world_size=1)


def threads_left_job(model: str) -> list[tuple[int, int]]:
    """Process groups and threads after each of several runtimes with every kind of group has trained and is closed."""
    left = []
    for _ in range(3):
        runtime = native_runtime(make_config(model, parallel={"tp": 2, "cp": 2}))
        train(runtime, runtime.build_model(), 1)
        runtime.close()
        left.append((len(dist.distributed_c10d._world.pg_map), len(list(Path("/proc/self/task").iterdir()))))
    return left


def test_closed_runtimes_leave_no_process_groups_and_no_threads(ranks: RankPool, tied_model: Path) -> None:
    for first, *others in ranks.run(threads_left_job, str(tied_model), world_size=4):
        assert all(left == first for left in others)
