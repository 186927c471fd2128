from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_backend.contracts import BatchError, ForwardResult, Metric, PackedBatch, TokenSequence, merge_metrics


def batch(**changes: Any) -> PackedBatch:
    """Sequences of 3, 1 and 2 tokens."""
    settings: dict[str, Any] = {"input_ids": torch.arange(10, 16), "seq_lens": torch.tensor([3, 1, 2])}
    return PackedBatch(**{**settings, **changes})


def test_positions_boundaries_and_labels_follow_from_the_lengths() -> None:
    packed = batch()
    assert (packed.num_tokens, packed.num_sequences) == (6, 3)
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6] and packed.cu_seqlens.dtype == torch.int32
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2]
    assert packed.labels.tolist() == [11, 12, -100, -100, 15, -100]


def test_temperature_is_a_number_for_all_or_one_per_sequence() -> None:
    assert batch().temperature == 1.0
    assert batch(meta={"temperature": 0.5}).temperature == 0.5
    per_sequence = batch(meta={"temperature": 0.5}, sequence_fields={"temperature": torch.tensor([1.0, 2.0, 3.0])})
    assert isinstance(per_sequence.temperature, torch.Tensor)
    assert per_sequence.temperature.tolist() == [1.0, 1.0, 1.0, 2.0, 3.0, 3.0]


def test_a_temperature_that_is_not_one_number_per_sequence_is_refused() -> None:
    with pytest.raises(BatchError, match=r"'temperature' has shape \(3, 1\); expected \(3,\)"):
        batch(sequence_fields={"temperature": torch.ones(3, 1)})


def test_a_batch_that_comes_to_the_host_is_waited_for_and_one_that_leaves_it_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[bool] = []

    def recording(tensor: torch.Tensor, device: torch.device | str, *, non_blocking: bool = False) -> torch.Tensor:
        waits.append(not non_blocking)
        return torch.empty_like(tensor, device=device)

    packed = batch(token_fields={"loss_mask": torch.ones(6)}, sequence_fields={"reward": torch.ones(3)})
    monkeypatch.setattr(torch.Tensor, "to", recording)
    on_device = packed.to(torch.device("meta"))
    assert waits == [False] * 3
    on_device.to("cpu")
    assert waits[3:] == [True] * 3


def test_splitting_gives_one_tensor_per_sequence() -> None:
    assert [row.tolist() for row in batch().split(torch.arange(6))] == [[0, 1, 2], [3], [4, 5]]
    with pytest.raises(RuntimeError, match="expects split_sizes to sum exactly to 5"):
        batch().split(torch.arange(5))


def test_a_missing_token_field_is_reported_with_those_there_are() -> None:
    with pytest.raises(BatchError, match=r"'advantages' is missing; the batch has \['loss_mask'\]"):
        batch(token_fields={"loss_mask": torch.ones(6)}).token_field("advantages")


def test_moving_a_batch_keeps_lengths_meta_and_payload_and_moves_the_rest() -> None:
    payload = object()
    moved = batch(
        token_fields={"loss_mask": torch.ones(6)},
        sequence_fields={"reward": torch.ones(3)},
        meta={"dp_size": 2},
        payload=payload,
    ).to("meta")
    tensors = [moved.input_ids, moved.token_fields["loss_mask"], moved.sequence_fields["reward"]]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.seq_lens.device.type == "cpu"
    assert moved.meta == {"dp_size": 2} and moved.payload is payload


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"input_ids has shape \(2, 3\)"),
        ({"input_ids": torch.zeros(6)}, "dtype torch.float32"),
        ({"input_ids": torch.zeros(0, dtype=torch.int64), "seq_lens": torch.zeros(0, dtype=torch.int64)}, "T >= 1"),
        ({"seq_lens": torch.tensor([3, 2])}, r"seq_lens \[3, 2\] must be .* positive, with the sum 6"),
        ({"seq_lens": torch.tensor([6, 0])}, r"seq_lens \[6, 0\] must be .* positive"),
        ({"seq_lens": torch.tensor([3.0, 3.0])}, r"seq_lens \[3\.0, 3\.0\] must be a"),
        ({"token_fields": {"loss_mask": torch.ones(5)}}, r"token field 'loss_mask' has shape \(5,\).* must be 6"),
        ({"token_fields": {"loss_mask": torch.ones(7)}}, r"token field 'loss_mask' has shape \(7,\).* must be 6"),
        (
            {"token_fields": {"a": torch.ones(6, 2), "b": torch.ones(2, 6)}},
            r"token field 'b' has shape \(2, 6\).* must be 6",
        ),
        ({"token_fields": {"loss_mask": torch.tensor(1.0)}}, "token field 'loss_mask'"),
        ({"sequence_fields": {"reward": torch.ones(2)}}, r"sequence field 'reward' has shape \(2,\).* must be 3"),
        ({"sequence_fields": {"reward": torch.ones(6)}}, r"sequence field 'reward' has shape \(6,\).* must be 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch(**changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TokenSequence(torch.zeros(1, 3, dtype=torch.int64)), "no batch dimension"),
        (lambda: TokenSequence(torch.zeros(0, dtype=torch.int64)), "L >= 1"),
        (lambda: TokenSequence(torch.zeros(3, dtype=torch.int32)), "dtype torch.int32"),
        (lambda: TokenSequence(torch.arange(3), {"mask": torch.ones(2)}), "'mask' has shape"),
        (lambda: TokenSequence(torch.arange(3), {"mask": torch.ones(4)}), "'mask' has shape"),
        (lambda: TokenSequence.from_prompt_and_response([], [1]), "a prompt of 0 and a response of 1 tokens"),
        (lambda: TokenSequence.from_prompt_and_response([1], []), "a prompt of 1 and a response of 0 tokens"),
        (
            lambda: TokenSequence.from_prompt_and_response([1], [2, 3], response_fields={"log_probs": [0.5]}),
            r"'log_probs' has shape \(1,\) for 2 response tokens",
        ),
    ],
)
def test_sequences_that_make_no_sense_are_refused(build: Callable[[], TokenSequence], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        build()


def test_what_belongs_to_a_response_token_stands_where_it_is_predicted() -> None:
    sequence = TokenSequence.from_prompt_and_response(
        [5, 6, 7], [8, 9], response_fields={"rollout_log_probs": [-0.5, -0.25], "routes": torch.tensor([[1, 2], [3, 4]])}
    )
    assert sequence.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert sequence.token_fields["loss_mask"].tolist() == [0, 0, 1, 1, 0]
    assert sequence.token_fields["rollout_log_probs"].tolist() == [0, 0, -0.5, -0.25, 0]
    assert sequence.token_fields["routes"].tolist() == [[0, 0], [0, 0], [1, 2], [3, 4], [0, 0]]


def test_fields_can_be_added_without_changing_the_original() -> None:
    original = TokenSequence(torch.arange(2), {"a": torch.zeros(2)})
    changed = original.with_fields({"b": torch.ones(2)}, {"reward": torch.tensor(1.0)})
    assert sorted(changed.token_fields) == ["a", "b"] and sorted(changed.sequence_fields) == ["reward"]
    assert sorted(original.token_fields) == ["a"] and not original.sequence_fields


def test_metrics_of_uneven_micro_batches_merge_to_the_mean_over_all() -> None:
    merged = merge_metrics([{"nll": Metric(10.0, 4.0)}, {"nll": Metric(2.0, 12.0), "kl": Metric(1.0, 2.0)}])
    assert merged == {"nll": Metric(12.0, 16.0), "kl": Metric(1.0, 2.0)}
    assert merged["nll"].mean == 0.75
    assert Metric(0.0, 0.0).mean != Metric(0.0, 0.0).mean


def test_a_result_adds_its_losses_and_names_outputs_it_lacks() -> None:
    result = ForwardResult((1.0, 0.5), {"nll": Metric(3.0, 2.0)}, {"log_probs": [torch.zeros(2)]})
    assert result.loss == 1.5 and result.means == {"nll": 1.5}
    assert len(result.output("log_probs")) == 1
    with pytest.raises(BatchError, match=r"'entropy' was not computed; the result has \['log_probs'\]"):
        result.output("entropy")
