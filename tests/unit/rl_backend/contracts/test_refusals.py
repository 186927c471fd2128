"""What sequences, batches and optimizer configurations refuse, beyond what their types do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_backend.contracts import BatchError, ConfigError, OptimizerConfig, PackedBatch, TokenSequence


def test_prompt_and_response_may_be_tensors() -> None:
    from_lists = TokenSequence.from_prompt_and_response([4, 5], [6, 7])
    from_tensors = TokenSequence.from_prompt_and_response(torch.tensor([4, 5]), torch.tensor([6, 7]))
    assert torch.equal(from_lists.input_ids, from_tensors.input_ids)
    assert from_tensors.token_fields["loss_mask"].tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(("prompt", "response"), [([], [1]), ([1], []), (torch.tensor([], dtype=torch.int64), [1])])
def test_an_empty_prompt_or_response_is_refused(prompt: Any, response: Any) -> None:
    with pytest.raises(BatchError, match="both need at least one"):
        TokenSequence.from_prompt_and_response(prompt, response)


@pytest.mark.parametrize("value", [1.0, [1.0], [1.0, 2.0, 3.0]])
def test_a_response_field_without_one_row_per_response_token_is_refused(value: Any) -> None:
    with pytest.raises(BatchError, match="'scores' has shape"):
        TokenSequence.from_prompt_and_response([1], [2, 3], response_fields={"scores": value})


def test_sequences_and_batches_compare_by_identity() -> None:
    sequence, batch = TokenSequence(torch.tensor([1, 2])), PackedBatch(torch.tensor([1, 2]), torch.tensor([2]))
    assert sequence in [TokenSequence(torch.tensor([1, 2])), sequence]
    assert batch in [PackedBatch(torch.tensor([1, 2]), torch.tensor([2])), batch]


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    batch = PackedBatch(torch.tensor([1, 2]), torch.tensor([2]), meta={"temperature": temperature})
    with pytest.raises(BatchError, match="temperature"):
        _ = batch.temperature


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"eps": float("inf")}, "eps"),
        ({"weight_decay": 0.1, "weight_decay_start": 0.0}, "weight_decay_start"),
        (
            {"weight_decay_start": 0.2, "weight_decay_incr_style": "linear", "total_training_steps": 9},
            "weight_decay_start",
        ),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 30, "total_training_steps": 10}, "lr_wsd_decay_steps"),
        ({"min_lr": 1e-4}, "min_lr"),
        ({"lr_decay_steps": 9}, "lr_decay_steps"),
        ({"lr_wsd_decay_steps": 3}, "lr_wsd_decay_steps"),
        ({"lr_wsd_decay_style": "cosine", "lr_decay_style": "linear", "lr_decay_steps": 9}, "lr_wsd_decay_style"),
        ({"lr_warmup_init": 1e-4}, "lr_warmup_init"),
        ({"lr_warmup_steps": 3, "lr_warmup_steps_ratio": 0.1, "total_training_steps": 50}, "lr_warmup_steps_ratio"),
    ],
)
def test_an_optimizer_option_that_would_be_ignored_or_cannot_work_is_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"OptimizerConfig.{name}="):
        OptimizerConfig(**fields)
