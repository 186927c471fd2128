"""Who is in which group, from the numbers of the ranks alone; and who makes and destroys the default group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.parallel import groups as module
from rl_backend.parallel.groups import (
    COLLECTIVE_TIMEOUT,
    close_groups,
    fake_rank,
    join_default_group,
    leave_default_group,
    open_groups,
    training_device,
)

CPU = torch.device("cpu")


def members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


# pp first, then dp, cp, and tp fastest: rank = ((pp * dp_size + dp) * cp_size + cp) * tp_size + tp.
@pytest.mark.parametrize(
    ("sizes", "rank", "world", "expected"),
    [
        (
            {"pp": 2, "cp": 2, "tp": 3, "ep": 2, "etp": 3},
            # pp 1, dp 1, cp 0, tp 2 of 2 * 2 * 2 * 3.
            20,
            24,
            {
                "pp": [8, 20],
                "dp": [14, 20],
                "cp": [20, 23],
                "tp": [18, 19, 20],
                "token": [18, 19, 20, 21, 22, 23],
                "replica": [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23],
                "expert": [18, 19, 20, 21, 22, 23],
                "mesh": [[12, 13, 14], [15, 16, 17], [18, 19, 20], [21, 22, 23]],
                "fsdp": [14, 17, 20, 23],
                "edp": [14, 20],
                "ep": [[18, 19, 20], [21, 22, 23]],
                "pipeline": 8,
            },
        ),
        (
            {"pp": 1, "cp": 1, "tp": 2, "ep": 4, "etp": 1},
            5,
            8,
            {
                "pp": [5],
                "dp": [1, 3, 5, 7],
                "cp": [5],
                "tp": [4, 5],
                "token": [4, 5],
                "replica": [4, 5],
                "expert": [4, 5, 6, 7],
                "mesh": [[0, 1], [2, 3], [4, 5], [6, 7]],
                "fsdp": [1, 3, 5, 7],
                "edp": [1, 5],
                "ep": [4, 5, 6, 7],
                "pipeline": 5,
            },
        ),
    ],
    ids=["all sizes", "experts over data ranks"],
)
def test_a_rank_is_in_the_groups_of_its_place(
    sizes: dict[str, int], rank: int, world: int, expected: dict[str, Any]
) -> None:
    parallel = ParallelConfig(**sizes)
    with fake_rank(parallel, rank, world) as groups:
        found = {
            name: members(getattr(groups, f"{name}_group"))
            for name in ("pp", "dp", "cp", "tp", "token", "replica", "expert")
        }
        found |= {name: members(getattr(groups, f"{name}_mesh").get_group()) for name in ("fsdp", "edp")}
        found |= {"mesh": groups.mesh.mesh.tolist(), "ep": groups.ep_mesh.mesh.tolist(), "pipeline": groups.pipeline}
        assert found == expected
        assert members(groups.tp_mesh.get_group()) == expected["tp"]
        assert members(groups.world_group) == members(groups.host_group) == list(range(world))
        assert (groups.dp_rank, groups.dp_size) == (expected["dp"].index(rank), len(expected["dp"]))
        assert groups.world_size == world and groups.parallel is parallel
        assert groups.expert_mesh.mesh.flatten().tolist() == groups.mesh.mesh.flatten().tolist()
        assert groups.device.type == "meta"


def test_what_was_made_is_destroyed_and_the_default_group_of_another_stays() -> None:
    with fake_rank(ParallelConfig(pp=2, tp=2), 5, 8):
        groups = open_groups(ParallelConfig(pp=2, tp=2), CPU)
        # Each partition of the ranks is made once.
        assert groups.token_group is groups.tp_group and groups.host_group in groups.made
        assert groups.world_group not in groups.made
        close_groups(groups)
        assert dist.is_initialized(), "made by another"
        for group in groups.made:
            with pytest.raises(KeyError):
                members(group)


def test_an_imagined_rank_leaves_the_process_as_it_was() -> None:
    hook = sys.excepthook
    with fake_rank(ParallelConfig(tp=2), 1, 4) as groups:
        assert (dist.get_rank(), dist.get_world_size(), groups.dp_rank) == (1, 4, 0)
        with pytest.raises(ValueError, match="initialize the default process group twice"):
            fake_rank(ParallelConfig(), 0, 1).__enter__()
    assert not dist.is_initialized() and sys.excepthook is hook
    with pytest.raises(ConfigError, match="world size 3"), fake_rank(ParallelConfig(tp=2), 1, 3):
        pass
    assert not dist.is_initialized() and module._default_group.users == 0
    with pytest.raises(KeyError), fake_rank(ParallelConfig(), 0, 1):
        raise KeyError
    assert not dist.is_initialized() and sys.excepthook is hook


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that no environment makes a rank of a job."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


def test_the_default_group_goes_with_its_last_user(alone: None) -> None:
    first = open_groups(ParallelConfig(), CPU)
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("gloo", 0, 1)
    world = module.world_group()
    second = open_groups(ParallelConfig(), CPU)
    assert first.world_group is second.world_group is world and first.host_group is not second.host_group
    close_groups(first)
    assert dist.is_initialized()
    # A layout that does not fit leaves its users as they were.
    with pytest.raises(ConfigError, match="world size 1"):
        open_groups(ParallelConfig(tp=2), CPU)
    assert dist.is_initialized()
    close_groups(second)
    assert not dist.is_initialized()
    close_groups(second)
    with pytest.raises(ConfigError, match="world size 1"):
        open_groups(ParallelConfig(pp=2), CPU)
    assert not dist.is_initialized()


def test_a_default_group_of_others_stays(alone: None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    groups = open_groups(ParallelConfig(), CPU)
    close_groups(groups)
    assert dist.is_initialized()
    join_default_group(CPU)
    leave_default_group()
    assert dist.is_initialized()
    with pytest.raises(ConfigError) as failure:
        join_default_group(torch.device("cuda", 0))
    message = str(failure.value)
    assert message.startswith("the default process group has the backends cpu:gloo")
    assert "training on cuda:0 needs cuda:nccl; initialise it with 'cpu:gloo,cuda:nccl', or let the runtime do it" in message
    assert failure.value.details["device"] == "cuda:0"
    dist.destroy_process_group()


def test_a_job_is_met_at_the_store_of_its_environment(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def meet(timeout: Any) -> tuple[Any, int, int]:
        asked.append(timeout)
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]

    monkeypatch.setattr(module, "job_store", meet)
    join_default_group(CPU)
    leave_default_group()
    assert asked == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    join_default_group(CPU)
    leave_default_group()
    assert asked == [COLLECTIVE_TIMEOUT] and COLLECTIVE_TIMEOUT.total_seconds() == 1800


@pytest.mark.parametrize(
    ("name", "devices", "local_rank", "expected"),
    [
        ("cpu", 4, "2", "cpu"),
        ("cpu", 0, None, "cpu"),
        ("auto", 0, "3", "cpu"),
        ("auto", 4, "3", "cuda:3"),
        ("auto", 4, None, "cuda:0"),
        ("cuda", 4, "1", "cuda:1"),
        ("cuda", 0, None, r"^device='cuda': this process sees 0 CUDA devices, none of the number LOCAL_RANK=0; use fewer"),
        ("cuda", 2, "2", r"^device='cuda': this process sees 2 CUDA devices, none of the number LOCAL_RANK=2"),
        ("auto", 1, "1", r"^device='auto': this process sees 1 CUDA devices, none of the number LOCAL_RANK=1"),
    ],
)
def test_a_rank_trains_on_the_device_of_its_number(
    monkeypatch: pytest.MonkeyPatch, name: str, devices: int, local_rank: str | None, expected: str
) -> None:
    chosen: list[Any] = []
    cuda = SimpleNamespace(is_available=lambda: devices > 0, device_count=lambda: devices, set_device=chosen.append)
    monkeypatch.setattr(module.torch, "cuda", cuda)
    monkeypatch.setattr(module, "_DEVICE_FILES", Path("/no/such/folder"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if expected.startswith("^"):
        with pytest.raises(ConfigError, match=expected):
            training_device(name)
        assert chosen == []
        return
    found = training_device(name)
    assert str(found) == expected
    assert chosen == ([found] if found.type == "cuda" else [])


@pytest.mark.shows(
    "runtime: device=auto refuses a machine with a GPU that torch cannot use, and never trains on its CPU instead"
)
@pytest.mark.parametrize(
    ("files", "visible", "refused"),
    [
        (["nvidia0", "nvidia1"], None, True),
        (["nvidia3"], "0", True),
        # Ranks that are given no GPU, and what a driver leaves without one.
        (["nvidia0"], "", False),
        (["nvidia0"], "-1", False),
        (["nvidiactl", "nvidia-uvm"], None, False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], visible: str | None, refused: bool
) -> None:
    for file in files:
        (tmp_path / file).touch()
    monkeypatch.setattr(module, "_DEVICE_FILES", tmp_path)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert training_device("cpu") == CPU
    if not refused:
        assert training_device("auto") == CPU
        return
    with pytest.raises(
        ConfigError, match=rf"^device='auto': this machine has {tmp_path}/nvidia[03], which torch .* cannot use"
    ):
        training_device("auto")


def test_every_group_waits_for_a_rank_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    patience, waits = timedelta(seconds=7), list[Any]()
    with fake_rank(ParallelConfig(tp=2), 1, 8):
        for name in ("new_group", "new_subgroups_by_enumeration"):
            make = getattr(dist, name)

            def noted(*arguments: Any, make: Any = make, **options: Any) -> Any:
                waits.append(options.get("timeout"))
                return make(*arguments, **options)

            monkeypatch.setattr(dist, name, noted)
        groups = open_groups(ParallelConfig(pp=2, tp=2), CPU, patience)
        close_groups(groups)
    assert groups.timeout == patience and len(waits) > 3 and set(waits) == {patience}
