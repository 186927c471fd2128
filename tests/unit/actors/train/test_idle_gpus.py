"""Ranks that would train on CPUs beside the cluster's GPUs say so."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from actors.train.ranks import _warn_of_idle_gpus
from rl_backend.contracts import RuntimeConfig


@pytest.mark.parametrize(
    ("device", "gpus_per_rank", "in_cluster", "warns"),
    [("auto", 0, 4, True), ("auto", 1, 4, False), ("auto", 0.5, 4, False), ("auto", 0, 0, False), ("cpu", 0, 4, False)],
)
def test_ranks_without_gpus_beside_gpus_are_named(
    device: str,
    gpus_per_rank: float,
    in_cluster: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    resources: dict[str, Any] = {"CPU": 8.0, **({"GPU": float(in_cluster)} if in_cluster else {})}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    config = RuntimeConfig.model_validate({"hf_path": "model", "backend_cfg": {"device": device}})
    _warn_of_idle_gpus(config, "policy", gpus_per_rank)
    expected = [
        "policy trains on CPUs although the cluster has 4 GPUs: a rank takes none unless gpus_per_rank says so. Use "
        "gpus_per_rank=1, or device='cpu' in the configuration"
    ]
    assert [record.getMessage() for record in caplog.records] == (expected if warns else [])
