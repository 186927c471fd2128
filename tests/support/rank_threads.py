"""Ranks that are threads of the test's own process, over gloo: a collective is tried in a twentieth of a second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined] # not in its __all__
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

_LIMIT = timedelta(seconds=30)
_here = threading.local()


def run_ranks[R](function: Callable[[dist.ProcessGroup], R], size: int = 2) -> list[R]:
    """What ``function`` of a group of ``size`` ranks returned, by rank; raises the error of the lowest rank that has one.

    A process has one default group, so code that asks torch for it is for :func:`run_ranks_with_meshes`. ``dist.get_rank``,
    ``dist.get_world_size`` and ``dist.new_group``, which only its own ranks call, answer for the thread's rank.
    """
    store = HashStore()
    # Until all have ended: one that is done would close the connections of another that still opens its own.
    groups: list[dist.ProcessGroup] = []

    def run(rank: int) -> R:
        _here.rank, _here.size, _here.store, _here.opened = rank, size, store, 0
        group = open_group(store, "all", rank, size)
        groups.append(group)
        known = dist.distributed_c10d._world.pg_group_ranks
        known[group] = {each: each for each in range(size)}
        try:
            return function(group)
        finally:
            del known[group]

    with _answering_for_threads(), ThreadPoolExecutor(size) as ranks:
        running = [ranks.submit(run, rank) for rank in range(size)]
    return [each.result() for each in running]


def open_group(store: Any, name: str, rank: int, size: int) -> dist.ProcessGroup:
    """One rank's end of a group that no other code knows of."""
    own = PrefixStore(name, store)
    gloo_type: Any = dist.ProcessGroupGloo
    options = gloo_type._Options()
    options._devices = [gloo_type.create_device(interface="lo")]
    options._timeout = _LIMIT
    group = dist.ProcessGroup(own, rank, size)
    backend = gloo_type(own, rank, size, options)
    gloo = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), gloo, backend)
    group._set_default_backend(gloo)
    return group


@contextmanager
def _answering_for_threads() -> Iterator[None]:
    def rank(group: dist.ProcessGroup | None = None) -> int:
        return int(_here.rank) if group is None else group.rank()

    def size(group: dist.ProcessGroup | None = None) -> int:
        return int(_here.size) if group is None else group.size()

    def new_group(ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
        _here.opened += 1
        own = list(range(_here.size) if ranks is None else ranks)
        return open_group(_here.store, f"{_here.opened} of {own}", own.index(_here.rank), len(own))

    with (
        patch.object(dist, "get_rank", rank),
        patch.object(dist, "get_world_size", size),
        patch.object(dist, "new_group", new_group),
        patch.object(dist, "destroy_process_group", lambda group: None),
    ):
        yield


def run_ranks_with_meshes[R](function: Callable[[dist.ProcessGroup], R], world_size: int) -> list[R]:
    """As :func:`run_ranks`, for code that needs a default group, as meshes do: torch's own double of gloo, without sends."""
    found: dict[int, R] = {}
    failed: list[BaseException] = []
    store = HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            group = dist.group.WORLD
            assert group is not None
            found[rank] = function(group)
            dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            failed.append(error)
            # The others would wait for this rank.
            ProcessLocalGroup.exception_handle(error)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_LIMIT.total_seconds())
        if failed:
            raise failed[0]
        assert not any(thread.is_alive() for thread in threads), "a rank waits for another"
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    return [found[rank] for rank in range(world_size)]
