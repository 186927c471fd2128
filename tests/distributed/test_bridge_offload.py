"""What a bridge model refuses while a part of it is in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import HandleError
from rl_backend.runtime.bridge.engine.engine import BridgeRuntime
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import bridge_data
from tests.support.native import token_loss
from tests.support.rank_pool import RankPool

PARTS = ("model", "optimizer", "grad")


def move(runtime: BridgeRuntime, handle: BridgeHandle, device: Any, *parts: str) -> None:
    for part in parts:
        runtime.to(handle, device, **{name: name == part for name in PARTS})


def away_job(model: str) -> None:
    with open_bridge(model) as runtime:
        handle = runtime.build_model()
        data = bridge_data(runtime)
        runtime.forward_backward(handle, data, token_loss)
        for part, refused in (
            ("model", lambda: runtime.export_weights(handle)),
            ("model", lambda: runtime.forward_backward(handle, data, None, forward_only=True)),
            ("grad", lambda: runtime.export_gradients(handle)),
            ("grad", lambda: runtime.forward_backward(handle, data, token_loss)),
            ("optimizer", lambda: runtime.optimizer_step(handle)),
            ("optimizer", lambda: runtime.save_checkpoint(handle, "never")),
        ):
            move(runtime, handle, "cpu", part)
            with pytest.raises(HandleError, match=f"{part} is in host memory"):
                refused()
            move(runtime, handle, "device", part)
        assert runtime.optimizer_step(handle).ok
        with pytest.raises(HandleError, match="expected 'cpu' or 'device'"):
            runtime.to(handle, "cuda")  # type: ignore[arg-type]


def test_what_needs_a_part_in_host_memory_is_refused(ranks: RankPool, tied_model: Path) -> None:
    ranks.run(away_job, str(tied_model), world_size=1)
