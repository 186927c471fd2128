"""Ranks of a job as threads of this process, for collectives of small tensors: nothing starts, nothing is sent anywhere.

torch's own double of gloo gives every thread a world of its own. It has no sends and receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

_SECONDS = 30.0


def run_in_threads[R](function: Callable[[dist.ProcessGroup], R], world_size: int) -> list[R]:
    """What ``function`` returns on each of ``world_size`` ranks, given the group of all; raises what a rank raised."""
    found: dict[int, R] = {}
    failed: list[BaseException] = []
    store = dist.HashStore()  # type: ignore[attr-defined]

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
            thread.join(_SECONDS)
        if failed:
            raise failed[0]
        assert not any(thread.is_alive() for thread in threads), "a rank waits for another"
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    return [found[rank] for rank in range(world_size)]
