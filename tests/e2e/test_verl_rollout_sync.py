"""verl's own weight sync into vLLM on a CPU is right, and needs each of the changes that make it so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import write_tiny_qwen3
from tests.support.rollout import write_tiny_qwen3_moe

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="for verl's CPU platform; this machine has an accelerator"
)


def synced(*arguments: str) -> dict[str, Any]:
    """What ``tests.support.verl_sync`` finds."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.verl_sync", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    gaps: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return gaps


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """For a mixture of experts with tied embeddings."""
    return synced(str(write_tiny_qwen3_moe(tmp_path_factory.mktemp("moe"))))


@pytest.mark.long
@pytest.mark.shows("verl: verl's own sync of adapters is right on a CPU")
def test_log_probs_with_verls_adapter_are_the_trainers(tmp_path: Path) -> None:
    gaps = synced(str(write_tiny_qwen3(tmp_path / "model")), "lora")
    assert max(gaps["with_adapter"]) <= 1e-5
    before, *others = gaps["base"]
    assert before <= 1e-5 and min(others) > 1e-3


@pytest.mark.shows("verl: verl's own weight sync is right on a CPU, for mixtures of experts and tied embeddings")
def test_log_probs_after_verls_update_are_the_trainers(found: dict[str, Any]) -> None:
    assert max(found["synced"]) <= 1e-5


def test_experts_are_old_when_they_are_packed_once(found: dict[str, Any]) -> None:
    assert found["experts_packed_once"] > 1e-3


def test_vllm_refuses_an_update_when_linear_layers_gave_their_weights_up(found: dict[str, Any]) -> None:
    assert "update_fails" in found
