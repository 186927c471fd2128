"""Moving the parts of a bridge model to host memory and back."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import HandleError
from rl_backend.runtime.bridge.handle import BridgeHandle
from rl_backend.runtime.bridge.runtime import BridgeRuntime
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import bridge_data, exported, exported_gradients, optimizer_shards, write_tiny_mixture
from tests.support.native import assert_equal_tensors, token_loss
from tests.support.rank_pool import RankPool

PARTS = ("model", "optimizer", "grad")


def move(runtime: BridgeRuntime, handle: BridgeHandle, device: Any, *parts: str) -> None:
    for part in parts:
        runtime.to(handle, device, **{name: name == part for name in PARTS})


def moved_training_job(model: str, layout: dict[str, int], settings: dict[str, Any]) -> None:
    """Trains two handles, one of which travels in every order between all atoms."""
    with open_bridge(model, layout, **settings) as runtime:
        data = bridge_data(runtime)
        moved, still = runtime.build_model(), runtime.build_model()
        orders = list(permutations(PARTS))
        for leaving, returning in zip(orders, reversed(orders), strict=True):
            for handle in (moved, still):
                runtime.zero_grad(handle)
                runtime.forward_backward(handle, data, token_loss)
            move(runtime, moved, "cpu", *leaving)
            assert all(moved.placement.host_bytes(part) > 0 for part in PARTS)
            move(runtime, moved, "device", *returning)
            assert_equal_tensors(exported_gradients(runtime, moved), exported_gradients(runtime, still))
            results = [runtime.optimizer_step(handle) for handle in (moved, still)]
            assert results[0] == results[1]
            move(runtime, moved, "cpu", "optimizer", "model", "grad")
            move(runtime, moved, "device", "model")
            assert_equal_tensors(exported(runtime, moved), exported(runtime, still))
            runtime.zero_grad(moved)
            runtime.zero_grad(still)
            outputs = [runtime.forward_backward(handle, data, token_loss).losses for handle in (moved, still)]
            assert outputs[0] == outputs[1]
            move(runtime, moved, "device", "optimizer")
            assert_equal_tensors(optimizer_shards(moved), optimizer_shards(still))


@pytest.mark.shows("bridge: parameters, gradients and optimizer state move to host memory, each on its own, bit for bit")
@pytest.mark.parametrize(
    ("world_size", "layout", "settings"),
    [(1, {}, {}), (2, {}, {"param_dtype": "bfloat16"}), (2, {"tp": 2}, {}), (2, {"pp": 2}, {"param_dtype": "bfloat16"})],
    ids=str,
)
def test_parts_travel_in_any_order_without_changing_a_bit(
    ranks: RankPool, tied_model: Path, world_size: int, layout: dict[str, int], settings: dict[str, Any]
) -> None:
    ranks.run(moved_training_job, str(tied_model), layout, settings, world_size=world_size)


def test_experts_travel_with_the_rest(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(moved_training_job, str(write_tiny_mixture(tmp_path)), {"ep": 2}, {})


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
