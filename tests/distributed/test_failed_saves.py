"""An asynchronous save that failed is heard of by every rank together, whoever has asked before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rl_backend.contracts import CheckpointError
from rl_backend.runtime import Runtime
from tests.support.bridge_runs import open_bridge
from tests.support.disk import full_disk
from tests.support.native import open_runtime
from tests.support.rank_pool import RankPool

CALLS: dict[str, Callable[[Runtime[Any], Any, Path], object]] = {
    "save_checkpoint": lambda runtime, handle, folder: runtime.save_checkpoint(handle, folder / "next"),
    "save_checkpoint of weights": lambda runtime, handle, folder: runtime.save_checkpoint(handle, folder / "next", hf=True),
    "load_checkpoint": lambda runtime, handle, folder: runtime.load_checkpoint(handle, folder / "good"),
    "wait_for_checkpoint": lambda runtime, handle, folder: runtime.wait_for_checkpoint(handle),
}


def poll(runtime: Runtime[Any], handle: Any) -> None:
    while runtime.checkpoint_is_pending(handle):
        time.sleep(0.01)


def failed_save_job(model: str, folder: str, backend: str, call: str, pollers: list[int]) -> str | None:
    """What ``call`` raised after a save in the background that rank 1 could not write, of which ``pollers`` know."""
    with open_runtime(model) if backend == "native" else open_bridge(model) as opened:
        runtime: Runtime[Any] = opened
        handle = runtime.build_model()
        # In the background too, because making the group for it writes to the ranks' own store.
        runtime.save_checkpoint(handle, Path(folder, "good"), asynchronous=True)
        runtime.wait_for_checkpoint(handle)
        with full_disk(dist.get_rank() == 1):
            runtime.save_checkpoint(handle, Path(folder, "saved"), asynchronous=True)
            if dist.get_rank() in pollers:
                with pytest.raises(CheckpointError, match="rank 1: "):
                    poll(runtime, handle)
                assert not runtime.checkpoint_is_pending(handle)
            dist.barrier()
            message = None
            if len(pollers) < dist.get_world_size():
                with pytest.raises(CheckpointError) as caught:
                    CALLS[call](runtime, handle, Path(folder))
                message = str(caught.value)
        CALLS[call](runtime, handle, Path(folder))
        runtime.save_checkpoint(handle, Path(folder, "saved"), asynchronous=True)
        poll(runtime, handle)
    return message


@pytest.mark.parametrize(
    ("backend", "call", "pollers"),
    [
        *(("native", call, [0]) for call in CALLS),
        ("native", "save_checkpoint", [1]),
        ("native", "save_checkpoint", [0, 1]),
        ("bridge", "save_checkpoint", [0]),
        ("bridge", "load_checkpoint", [0]),
    ],
    ids=str,
)
def test_ranks_that_have_not_asked_for_a_failed_save_raise_with_those_that_have(
    ranks: RankPool, tied_model: Path, tmp_path: Path, backend: str, call: str, pollers: list[int]
) -> None:
    messages = ranks.run(failed_save_job, str(tied_model), str(tmp_path), backend, call, pollers)
    for message in messages:
        if len(pollers) == 2:
            assert message is None
        else:
            assert message is not None
            assert "saved could not be written: rank 1: " in message
    assert {"good", "saved"} <= {entry.name for entry in tmp_path.iterdir()} <= {"good", "next", "saved"}
