"""Log-probs of texts by the trainer's forward pass: those that are asked for together, and each failure for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.serve import wire
from actors.serve.scores import Scoring
from actors.serve.training import Training
from actors.serve.wire import Cells
from rl_backend.contracts import BatchError
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.served import GroupInProcess

TEXTS = ([5, 9, 3, 7, 21, 33, 8], [4, 6], [11, 2, 90, 1])


def test_texts_that_are_asked_for_together_have_the_log_probs_of_torch_and_one_that_is_wrong_fails_alone(
    model: Path,
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model)
    with open_runtime(model) as runtime:
        limits = {"vocab_size": VOCAB_SIZE, "longest": 64, "max_rank": 8, "max_runs": 8}
        training = Training(GroupInProcess(runtime, 64), lambda *_: None, model=model, **limits)  # type: ignore[arg-type]
        with training._changed:
            asked = []
            for text in (*TEXTS, [1, VOCAB_SIZE]):
                ids = np.full((len(text) - 1, 2), -1)
                ids[-1, 0] = 17
                asked.append(training.read_log_probs(None, None, Scoring(text, 3, Cells(ids), 0.5)))
            plain = training.read_log_probs(None, None, Scoring(TEXTS[0]))
        found = [each.result(60) for each in asked[:-1]]
        with pytest.raises(BatchError, match=f"token {VOCAB_SIZE}"):
            asked[-1].result(60)
        last = plain.result(60)
        training.close()
    for text, scores in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            rows = (reference(torch.tensor([text])).logits[0] / 0.5).log_softmax(-1)[:-1]
        assert np.isnan(scores.log_probs[0]) and scores.top_ids[0].tolist() == [0] * 3
        assert np.allclose(scores.log_probs[1:], rows.gather(1, torch.tensor(text[1:])[:, None])[:, 0], atol=1e-5)
        values, ids_of_top = rows.topk(3)
        assert scores.top_ids[1:].tolist() == ids_of_top.tolist()
        assert np.allclose(scores.top_log_probs[1:], values, atol=1e-5)
        assert scores.targets[-1].tolist() == pytest.approx([float(rows[-1, 17]), 0.0], abs=1e-5)
    assert last.top_ids.shape == (7, 0) and last.targets.shape == (6, 0)
    with torch.no_grad():
        cool = reference(torch.tensor([TEXTS[0]])).logits[0].log_softmax(-1)
    assert np.allclose(last.log_probs[1:], cool[:-1].gather(1, torch.tensor(TEXTS[0][1:])[:, None])[:, 0], atol=1e-5)


def test_texts_that_wait_are_computed_by_the_tokens_of_a_pass(model: Path) -> None:
    sizes: list[int] = []

    class Counting(GroupInProcess):
        def forward(self, handle: Any, rows: Any, *, meta: Any = None) -> Any:
            sizes.append(sum(map(len, rows)))
            return super().forward(handle, rows, meta=meta)

    with open_runtime(model) as runtime:
        limits = {"vocab_size": VOCAB_SIZE, "longest": 64, "max_rank": 8, "max_runs": 8}
        training = Training(Counting(runtime, 64), lambda *_: None, model=model, **limits)  # type: ignore[arg-type]
        with training._changed:
            asked = [training.read_log_probs(None, None, Scoring(TEXTS[0])) for _ in range(20)]
        found = [each.result(60).log_probs[1:] for each in asked]
        training.close()
    assert sizes == [63, 63, 14] and all(np.allclose(each, found[0], atol=1e-6) for each in found)


@pytest.mark.parametrize("places", [[(0, 1), (2, 0), (2, 2)], [(1, 2)], [(3, 0), (3, 1)], []], ids=str)
def test_sparse_log_probs_are_sent_row_by_row(places: list[tuple[int, int]]) -> None:
    whole, (rows, columns) = np.zeros((4, 3), np.float32), np.array(places, np.int64).reshape(-1, 2).T
    whole[rows, columns] = -1.0 - np.arange(len(places))
    body = wire.write_samples([], prompt_targets=Cells(whole, (rows, columns)))
    sent = wire._MESSAGES["SampleResponse"].FromString(body).target_prompt_logprobs
    assert list(sent.shape) == [4, 3] and not sent.HasField("dense")
    begins = [sum(row < end for row, _ in places) for end in range(5)]
    assert np.frombuffer(sent.sparse_csr.crow_indices, "<i8").tolist() == begins
    assert np.frombuffer(sent.sparse_csr.col_indices, "<i8").tolist() == [column for _, column in places]
    assert np.frombuffer(sent.sparse_csr.values, "<f4").tolist() == [-1.0 - number for number in range(len(places))]
