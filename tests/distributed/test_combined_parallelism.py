"""Wrong numbers that Megatron-LM #7452 reports, tried in both runtimes: docs/reference/combined_parallelism.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.contracts import TARGET_IDS, MetricValue, ModelOutput, PackedBatch, TokenSequence
from rl_backend.data.micro_batches import pack
from tests.support.bridge_runs import Run, open_bridge, train_job, whole
from tests.support.families import load_transformers, random_sequences
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import assert_near, open_runtime, relative_difference
from tests.support.rank_pool import RankPool
from tests.support.transformers_gradients import stored_gradients

VOCABULARY = 131
"""Prime: two tensor-parallel ranks have unequal parts, and Megatron pads one."""
SMOOTHING = 0.2
LENGTHS = (9, 4, 17)
ROUTER = "model.layers.1.mlp.gate.weight"


def smoothed_loss(output: ModelOutput, *_: Any) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Cross-entropy with labels smoothed over the whole vocabulary, whose log-probs come after the label's."""
    assert output.log_probs is not None
    label, every = output.log_probs[:, 0], output.log_probs[:, 1:]
    return -(1 - SMOOTHING) * label.sum() - SMOOTHING * every.mean(1).sum(), {}


def smoothed_job(model: str, backend: str) -> tuple[float, dict[str, Tensor]]:
    def row(ids: Tensor) -> TokenSequence:
        every = torch.arange(VOCABULARY).expand(len(ids), VOCABULARY)
        targets = torch.cat([ids.roll(-1)[:, None], every], 1)
        targets[-1] = -100
        return TokenSequence(ids, {TARGET_IDS: targets}, {})

    with (open_bridge if backend == "bridge" else open_runtime)(model, parallel={"tp": 2}) as runtime:
        handle = runtime.build_model()
        batch: PackedBatch = pack([row(ids) for ids in random_sequences(LENGTHS, VOCABULARY)], {})
        result = runtime.forward_backward(handle, [batch], smoothed_loss)
        return result.loss, {name: value.clone() for name, value in runtime.export_gradients(handle)}


@pytest.mark.shows("runtime: a cross-entropy with smoothed labels over tp is torch's, with its gradients, in both runtimes")
@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_smoothed_labels_take_the_whole_vocabulary(ranks: RankPool, tmp_path: Path, backend: str) -> None:
    """Findings 1 and 2: another loss on every rank, or one that is log(tp) too large."""
    path = write_tiny("qwen3", tmp_path / "model", vocab_size=VOCABULARY, tie_word_embeddings=False)
    reference = load_transformers(path)
    expected = torch.zeros(())
    for ids in random_sequences(LENGTHS, VOCABULARY):
        logits = reference(ids[None]).logits[0, :-1]
        expected = expected + F.cross_entropy(logits, ids[1:], reduction="sum", label_smoothing=SMOOTHING)
    expected.backward()
    expected_gradients = stored_gradients(reference)
    for loss, gradients in ranks.run(smoothed_job, str(path), backend):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert_near(gradients, expected_gradients, 2e-5)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixture"))


@pytest.mark.shows("bridge: the balancing losses of padded micro-batches have the gradients of tp=1 with tp, and beside dp")
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_balancing_losses_of_padded_micro_batches(ranks: RankPool, mixture: Path, kind: str, dp: int) -> None:
    """Findings 5 and 10: padding of another replica, and the tokens of all ranks counted as one rank's."""

    def run(tp: int, **losses: Any) -> Run:
        settings = {"override_transformer_config": losses}
        return whole(ranks.run(train_job, str(mixture), {"tp": tp}, 1, settings, world_size=tp * dp))

    losses = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.5}
    expected = run(1, **losses)
    assert relative_difference(expected.gradients[ROUTER], run(1).gradients[ROUTER]) > 0.1
    found = run(2, **losses)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert_near(found.gradients, expected.gradients)
