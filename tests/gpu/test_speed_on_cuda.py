"""Tokens per second of a model of 0.6 billion parameters, to stand beside what others publish."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.train_speed import make_model, runtime_step, timed

pytestmark = pytest.mark.gpu

QWEN3_0_6B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("compiled", [False, True])
def test_supervised_training(tmp_path: Path, record_property: Callable[[str, object], None], compiled: bool) -> None:
    losses: list[float] = []
    step = runtime_step(
        make_model(tmp_path, **QWEN3_0_6B),
        "native",
        device="cuda",
        dtype="bfloat16",
        compile=compiled,
        activation_checkpointing="none" if compiled else "selective",
    )
    measure = timed(step, [[4096] * 4], losses, QWEN3_0_6B["vocab_size"])
    # The first ones compile, and fill the allocator.
    figures = [measure() for _ in range(8)][3:]
    assert all(map(math.isfinite, losses))
    record_property(f"sft_tokens_per_second{'_compiled' if compiled else ''}", round(statistics.median(figures)))
