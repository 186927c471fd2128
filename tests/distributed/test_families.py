"""Families other than Qwen3 on two ranks, with activation checkpointing: biases, windows and scaled positions included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import write_tiny
from tests.support.native import (
    assert_near,
    deal,
    gradients_job,
)
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "llama": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8},
    },
}


@pytest.mark.parametrize("family", MODELS)
def test_gradients_on_two_ranks_with_recomputed_layers_are_those_of_one_rank(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    model = str(write_tiny(family, tmp_path / "model", vocab_size=129, **MODELS[family]))
    expected = gradients_job(model, [[[0, 1, 2, 3, 4, 5, 6, 7]]], {})
    settings = {"activation_checkpointing": "full"}
    result = ranks.run(gradients_job, model, deal(SPLIT, 2), settings, world_size=2)[0]
    assert_near(result, expected)
