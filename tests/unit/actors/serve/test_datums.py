"""Data of training requests: what is refused before a pass, and what a pass is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actors.serve.datums import check, loss_of, not_finite, sequence_of, signature_of
from actors.serve.wire import Datum
from rl_backend.contracts import TARGET_IDS, BatchError, ConfigError, UnsupportedError

COLUMN = np.array([0.5, -1.0, 2.0])
POLICY = {"logprobs": COLUMN, "advantages": COLUMN}


def datum(tokens: Any = (1, 2, 3), targets: Any = (2, 3, 9), **columns: Any) -> Datum:
    inputs = {"target_tokens": np.array(targets, np.int64), **columns}
    return Datum(np.array(tokens, np.int64), inputs)


def refused(given: Datum, loss: str = "cross_entropy", *, forward_only: bool = False) -> str:
    """Why, of a model of ten tokens and data of four; empty where nothing is wrong."""
    try:
        check("datum 7", given, loss, vocab_size=10, longest=4, forward_only=forward_only)
    except BatchError as error:
        return str(error)
    return ""


WIDE = np.array([[2, 0], [3, 1], [9, 5]])


@pytest.mark.parametrize(
    ("given", "loss", "forward_only"),
    [
        (datum(), "cross_entropy", False),
        (datum((0, 9, 9, 9), (9, 0, 0, 0)), "cross_entropy", False),
        (datum((5,), (5,)), "cross_entropy", False),
        (datum(targets=WIDE, weights=np.ones((3, 2))), "cross_entropy", False),
        *((datum(**POLICY), loss, False) for loss in ("importance_sampling", "ppo", "cispo", "dro")),
        (datum(**POLICY, sequence_ratio_mask=COLUMN), "gspo", False),
        (datum(**POLICY, clip_low_threshold=COLUMN, clip_high_threshold=COLUMN), "ppo", False),
        (datum(**POLICY, clip_low_threshold=COLUMN), "cispo", False),
        (datum(**POLICY, sequence_ratio_mask=COLUMN, clip_high_threshold=COLUMN), "gspo", False),
        (datum(mine=np.array([np.nan, 1.0])), "cross_entropy", True),
    ],
)
def test_data_that_a_pass_can_take_are_taken(given: Datum, loss: str, forward_only: bool) -> None:
    assert refused(given, loss, forward_only=forward_only) == ""


@pytest.mark.parametrize(
    ("given", "loss", "forward_only", "said"),
    [
        (datum((), ()), "cross_entropy", False, "0 tokens; expected 1 to 4"),
        (datum((1,) * 5, (1,) * 5), "cross_entropy", False, "5 tokens; expected 1 to 4"),
        (datum((1, 2, 10)), "cross_entropy", False, "model_input has ids from 1 to 10; expected 0 to 9"),
        (datum((-1, 2, 3)), "cross_entropy", False, "model_input has ids from -1 to 3"),
        (datum(targets=(2, 3, 10)), "cross_entropy", False, "target_tokens has ids from 2 to 10"),
        (datum(targets=(2, -1, 3)), "cross_entropy", False, "target_tokens has ids from -1 to 3"),
        (datum(targets=(2, 3)), "cross_entropy", False, "3 input tokens, but target_tokens has the shape (2,)"),
        (datum(targets=np.zeros((3, 0))), "cross_entropy", False, "the shape (3, 0)"),
        (datum(targets=np.zeros((3, 1, 1))), "cross_entropy", False, "the shape (3, 1, 1)"),
        (datum(targets=WIDE, weights=COLUMN), "cross_entropy", False, "weights has the shape (3,); expected (3, 2)"),
        (datum(weights=np.ones((3, 1))), "cross_entropy", False, "weights has the shape (3, 1); expected (3,)"),
        (datum(targets=WIDE[:, :1], **POLICY), "ppo", False, "loss_fn='ppo' takes one target a token"),
        (datum(logprobs=COLUMN, advantages=COLUMN[:2]), "ppo", False, "advantages has the shape (2,)"),
        (datum(logprobs=COLUMN, advantages=COLUMN * np.inf), "ppo", True, "advantages has values that are not finite"),
        (datum(logprobs=COLUMN), "dro", False, "lacks advantages"),
        (datum(**POLICY), "gspo", False, "lacks sequence_ratio_mask"),
        (datum(), "ppo", True, "lacks logprobs, advantages"),
        (datum(mine=COLUMN), "cross_entropy", False, "has mine, which it does not read"),
        (datum(**POLICY), "cross_entropy", False, "has logprobs, advantages, which it does not read"),
        (datum(**POLICY, weights=COLUMN), "ppo", False, "has weights, which it does not read"),
        (datum(**POLICY, clip_low_threshold=COLUMN), "importance_sampling", False, "has clip_low_threshold"),
    ],
    ids=range(21),
)
def test_a_datum_that_would_fail_the_pass_of_others_is_refused_by_its_column(
    given: Datum, loss: str, forward_only: bool, said: str
) -> None:
    found = refused(given, loss, forward_only=forward_only)
    assert found.startswith("datum 7: ") and said in found


def test_a_request_without_targets_lacks_them() -> None:
    assert "lacks target_tokens" in refused(Datum(np.array([1]), {"weights": np.ones(1)}))


def test_rows_of_one_pass_have_as_many_targets_and_the_same_further_columns() -> None:
    clips = {"clip_high_threshold": COLUMN, "clip_low_threshold": COLUMN}
    for given, loss, expected in (
        (datum(), "cross_entropy", (0, ())),
        (datum(weights=COLUMN), "cross_entropy", (0, ())),
        (datum(**POLICY), "ppo", (0, ())),
        (datum(**POLICY, sequence_ratio_mask=COLUMN), "gspo", (0, ())),
        (datum(targets=WIDE), "cross_entropy", (2, ())),
        (datum(targets=WIDE[:, :1]), "cross_entropy", (1, ())),
        (datum(**POLICY, **clips), "ppo", (0, ("clip_high_threshold", "clip_low_threshold"))),
        (datum(mine=COLUMN), "cross_entropy", (0, ())),
    ):
        assert signature_of(given, loss) == expected
    reversed_clips = dict(reversed(clips.items()))
    assert signature_of(datum(**clips), "cispo") == signature_of(datum(**reversed_clips), "cispo")


def test_a_row_has_every_shared_column_and_those_that_its_loss_reads() -> None:
    given = datum(**POLICY, clip_low_threshold=COLUMN, mine=COLUMN)
    row = sequence_of(given, "ppo", 5)
    fields = {name: values.tolist() for name, values in row.token_fields.items()}
    assert fields == {
        "logprobs": [0.5, -1.0, 2.0],
        "advantages": [0.5, -1.0, 2.0],
        "clip_low_threshold": [0.5, -1.0, 2.0],
        "sequence_ratio_mask": [0.0] * 3,
        "weights": [1.0] * 3,
        "loss_mask": [1.0] * 3,
        TARGET_IDS: [2, 3, 9],
    }
    assert {name: values.dtype for name, values in row.token_fields.items() if values.dtype != torch.float32} == {
        TARGET_IDS: torch.int64
    }
    assert row.sequence_fields["lora"].item() == 5 and row.input_ids.tolist() == [1, 2, 3]
    row.input_ids[0] = 77
    assert given.tokens.tolist() == [1, 2, 3], "it is a view of the request"
    wide = sequence_of(datum(targets=WIDE), "cross_entropy", 0)
    assert wide.token_fields["weights"].tolist() == [[1.0, 1.0]] * 3 and wide.token_fields["logprobs"].shape == (3,)
    weighted = sequence_of(datum(weights=COLUMN), "cross_entropy", 0)
    assert weighted.token_fields["weights"].tolist() == [0.5, -1.0, 2.0]
    assert weighted.token_fields["advantages"].tolist() == [0.0] * 3


def test_the_datum_is_named_of_which_a_loss_is_not_finite() -> None:
    def policy(log_prob: float, advantage: float = 1.0) -> Datum:
        return datum((1,), (1,), logprobs=np.array([log_prob]), advantages=np.array([advantage]))

    near, found = policy(-1.0), [np.array([0.0])] * 3
    assert not_finite(4, [near, policy(-89.0), near], found).startswith("datum 5: logprobs are up to 89 nats")
    assert not_finite(4, [near, near, policy(89.0)], found).startswith("datum 6: logprobs are up to 89 nats")
    whole = "its sum over tokens and data is not finite"
    assert not_finite(4, [near, policy(-88.0), policy(-1e9, 0.0)], found) == whole, "what is not read overflows nothing"
    assert not_finite(0, [datum((1,), (1,), advantages=np.array([1.0]))], found[:1]) == whole
    broken = [np.array([0.0]), np.array([np.nan]), np.array([np.inf])]
    assert not_finite(2, [near] * 3, broken) == "datum 3: the adapter gives log-probs that are not finite"


def test_a_loss_has_the_options_of_its_request() -> None:
    assert loss_of("ppo", {"clip_low_threshold": 0.5}).keywords == {"clip_low_threshold": 0.5}
    with pytest.raises(UnsupportedError, match="'reinforce' is not served here; there are cross_entropy"):
        loss_of("reinforce", {})
    with pytest.raises(ConfigError, match="clip_low_threshold"):
        loss_of("importance_sampling", {"clip_low_threshold": 0.5})
