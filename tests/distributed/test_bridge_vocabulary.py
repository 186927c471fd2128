"""Probabilities over the vocabulary: without the rows by which Megatron pads it, and with the entropy of a plain softmax."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.bridge_runs import open_bridge
from tests.support.families import load_transformers, run_transformers
from tests.support.models import write_tiny_qwen3
from tests.support.native import micro_batches, open_runtime, token_loss
from tests.support.rank_pool import RankPool


def outputs_job(model: str, backend: str, layout: dict[str, int]) -> dict[str, list[Tensor]]:
    """Log-probs and entropy of two micro-batches, on the rank that has them."""
    data = micro_batches([[0, 1], [2]], calculate_entropy=True)
    opened = open_bridge(model, layout) if backend == "bridge" else open_runtime(model, parallel=layout)
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


@pytest.mark.shows("reading a run: the entropy is that of a plain softmax in float64, in both runtimes, also with tp=2")
@pytest.mark.parametrize(("backend", "tp"), [("native", 1), ("native", 2), ("bridge", 1), ("bridge", 2)])
def test_the_entropy_of_a_forward_pass_is_that_of_a_plain_softmax(
    ranks: RankPool, tmp_path: Path, backend: str, tp: int
) -> None:
    model = write_tiny_qwen3(tmp_path / "model", vocab_size=130)
    sequences = [sequence for batch in micro_batches([[0, 1], [2]]) for sequence in batch.split(batch.input_ids)]
    with torch.no_grad():
        expected = run_transformers(load_transformers(model).double(), sequences).entropy
    found = ranks.run(outputs_job, str(model), backend, {"tp": tp}, world_size=tp)[0]["entropy"]
    assert expected is not None and expected.max() > 1.0
    torch.testing.assert_close(torch.cat(found).double(), expected.double(), rtol=0, atol=1e-5)
