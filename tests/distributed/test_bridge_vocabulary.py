"""Rows by which Megatron pads a vocabulary take no part in any probability."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.support.bridge_runs import open_bridge
from tests.support.models import write_tiny_qwen3
from tests.support.native import micro_batches, open_runtime, token_loss
from tests.support.rank_pool import RankPool


def outputs_job(model: str, backend: str, layout: dict[str, int]) -> dict[str, list[Tensor]]:
    """Log-probs and entropy of two micro-batches, on the rank that has them."""
    data = micro_batches([[0, 1], [2]], calculate_entropy=True)
    opened = open_bridge(model, layout) if backend == "bridge" else open_runtime(model)
    with opened as runtime:
        handle = runtime.build_model(forward_only=True)
        result = runtime.forward_backward(handle, data, token_loss, forward_only=True)
    return {name: list(values) for name, values in result.outputs.items()}


def test_padding_of_a_vocabulary_has_no_probability(ranks: RankPool, tmp_path: Path) -> None:
    model = str(write_tiny_qwen3(tmp_path / "odd", vocab_size=131))
    expected = ranks.run(outputs_job, model, "native", {}, world_size=1)[0]
    found = ranks.run(outputs_job, model, "bridge", {"tp": 2})[0]
    for name, values in expected.items():
        for value, other in zip(values, found[name], strict=True):
            torch.testing.assert_close(other, value, rtol=0, atol=1e-5)
