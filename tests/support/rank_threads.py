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

_LIMIT = timedelta(seconds=30)
_here = threading.local()


def run_ranks[R](function: Callable[[dist.ProcessGroup], R], size: int = 2) -> list[R]:
    """What ``function`` of a group of ``size`` ranks returned, by rank; raises the error of the lowest rank that has one.

    A process has one default group, so code that asks torch for it is not for these. ``dist.get_rank``,
    ``dist.get_world_size`` and ``dist.new_group``, which only its own ranks call, answer for the thread's rank.
    """
    store = HashStore()

    def run(rank: int) -> R:
        _here.rank, _here.size, _here.store, _here.opened = rank, size, store, 0
        group = open_group(store, "all", rank, size)
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
