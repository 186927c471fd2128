"""The plan of DeepSeek-V3 as it is released: 671B parameters on 256 devices of 80 GB."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rl_backend.contracts import NativeConfig, ParallelConfig, RuntimeConfig
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from tests.support.released_deepseek import DEEPSEEK_V3

DEVICE_BYTES = 80 * 10**9


@pytest.mark.shows("plan: DeepSeek-V3's 671B are planned in less than 3 minutes, and fit 256 devices of 80 GB")
@pytest.mark.long
def test_the_real_model_is_planned_in_minutes_and_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    native = NativeConfig(
        parallel=ParallelConfig(tp=8, ep=256), param_dtype="bfloat16", activation_checkpointing="full", device="cpu"
    )
    began = time.process_time()
    plan = make_plan(RuntimeConfig(hf_path=str(tmp_path), backend_cfg=native), 256, Workload())
    assert time.process_time() - began < 180
    assert plan.sync_bytes / 2 == pytest.approx(671.03e9, rel=1e-4)
    assert not plan.phases_over(DEVICE_BYTES)
