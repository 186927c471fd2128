"""What a TrainGroup refuses before it reserves anything."""

from __future__ import annotations

import pytest

from actors.train.start import start_ranks
from rl_backend.contracts import ConfigError, RuntimeConfig


def test_a_group_refuses_steps_that_nobody_waits_for() -> None:
    config = RuntimeConfig(hf_path="nowhere", backend_cfg={"parallel": {"pp": 2}, "post_validation": True})
    with pytest.raises(
        ConfigError, match=r"NativeConfig\.post_validation=True: a TrainGroup answers with each step's result"
    ):
        start_ranks(
            config,
            group_id="group",
            name="",
            num_ranks=2,
            cores_per_rank=1,
            gpus_per_rank=0,
            placement="pack",
            failure_grace=1.0,
            placement_timeout=1.0,
            start_timeout=1.0,
        )
