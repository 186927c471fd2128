"""The schedules after an optimizer step that was refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_backend.checkpoint.manifest import read_manifest
from rl_backend.runtime.optimizer import ParameterSchedule
from tests.support.bridge_runs import poisoned_loss
from tests.support.checkpoint_layouts import OPTIMIZER, Layout, bridge, native
from tests.support.native import micro_batches, token_loss
from tests.support.rank_pool import RankPool


def refused_job(layout: Layout, model: str, path: str) -> list[float]:
    """Learning rates of a step, one that is refused, and one after loading the checkpoint that was written then."""
    with layout.open(model) as runtime:
        handle = runtime.build_model()
        rates = [step(runtime, handle, token_loss, ok=True), step(runtime, handle, poisoned_loss, ok=False)]
        assert handle.weight_version == 1
        runtime.save_checkpoint(handle, path)
        loaded = runtime.build_model()
        runtime.load_checkpoint(loaded, path)
        return [*rates, step(runtime, loaded, token_loss, ok=True)]


def step(runtime: Any, handle: Any, loss: Any, *, ok: bool) -> float:
    runtime.zero_grad(handle)
    runtime.forward_backward(handle, micro_batches([[0, 1], [2, 3]]), loss)
    assert runtime.optimizer_step(handle).ok == ok
    return float(runtime.lr_scheduler_step(handle))


@pytest.mark.shows("runtime: schedules count every step of the loop, even a refused one, and a checkpoint keeps both counts")
@pytest.mark.parametrize("layout", [native(1), bridge(1)], ids=str)
def test_schedules_go_on_after_a_refused_step(ranks: RankPool, tied_model: Path, tmp_path: Path, layout: Layout) -> None:
    (rates,) = ranks.run(refused_job, layout, str(tied_model), str(tmp_path / "saved"), world_size=1)
    schedule = ParameterSchedule(OPTIMIZER)
    assert rates == pytest.approx([schedule.step() for _ in range(3)], rel=1e-12)
    manifest = read_manifest(tmp_path / "saved")
    assert (manifest.schedule_steps, manifest.optimizer_steps) == (2, 1)
