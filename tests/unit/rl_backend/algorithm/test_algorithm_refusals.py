"""Fields, outputs, denominators and options that losses refuse, by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rl_backend.algorithm import aggregate_loss, cispo_loss, grpo_loss, gspo_loss, value_loss
from rl_backend.contracts import BatchError, ConfigError, ModelOutput, PackedBatch
from tests.support.rl_batches import batch_meta, pack, random_sequences

FULL_GRPO = partial(grpo_loss, kl_coef=0.1, tis_cap=1.5)


@pytest.mark.parametrize("field", ["loss_mask", "old_log_probs", "advantages", "ref_log_probs", "rollout_log_probs"])
def test_a_missing_or_misshapen_field_is_named(field: str) -> None:
    sequences = random_sequences(15)
    output, batch = pack(sequences, batch_meta(sequences))
    fields = {name: value for name, value in batch.token_fields.items() if name != field}
    with pytest.raises(BatchError, match=f"'{field}' is missing"):
        FULL_GRPO(output, PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta))
    fields[field] = torch.zeros(batch.num_tokens, 1)
    with pytest.raises(BatchError, match=f"'{field}' has shape"):
        FULL_GRPO(output, PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta))


@pytest.mark.parametrize(
    ("mode", "name"),
    [("token-mean", "batch_num_tokens"), ("seq-mean-token-mean", "global_batch_size"), ("token-mean", "dp_size")],
)
@pytest.mark.parametrize("value", [None, 0, float("nan")])
def test_a_global_denominator_is_never_guessed(mode: str, name: str, value: float | None) -> None:
    sequences = random_sequences(16)
    output, batch = pack(sequences, {**batch_meta(sequences), name: value})
    with pytest.raises(BatchError, match=name):
        aggregate_loss(output.log_probs, batch.token_field("loss_mask"), batch, mode)


def test_missing_model_outputs_are_refused_with_what_to_set() -> None:
    sequences = random_sequences(17)
    output, batch = pack(sequences, batch_meta(sequences))
    with pytest.raises(BatchError, match="log_probs"):
        grpo_loss(ModelOutput(), batch)
    with pytest.raises(BatchError, match="calculate_entropy"):
        grpo_loss(ModelOutput(output.log_probs), batch, entropy_coef=0.1)
    with pytest.raises(BatchError, match="without one"):
        grpo_loss(ModelOutput(output.log_probs, output.entropy.detach()), batch, entropy_coef=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_ratio_low", -0.1),
        ("clip_ratio_high", float("nan")),
        ("clip_ratio_c", 1.0),
        ("loss_agg_mode", "mean"),
        ("loss_scale_factor", 3.0),
        ("kl_coef", -1.0),
        ("kl_type", "k4"),
        ("tis_cap", 0.0),
        ("entropy_coef", float("inf")),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name_and_value(name: str, value: Any) -> None:
    sequences = random_sequences(18)
    output, batch = pack(sequences, batch_meta(sequences))
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        grpo_loss(output, batch, **{name: value})


def test_a_scale_factor_that_is_needed_is_asked_for() -> None:
    sequences = random_sequences(18)
    output, batch = pack(sequences, batch_meta(sequences))
    with pytest.raises(ConfigError, match="loss_scale_factor=None"):
        grpo_loss(output, batch, loss_agg_mode="seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("loss_fn", "options", "message"),
    [
        (gspo_loss, {"clip_ratio_c": 3.0}, "clip_ratio_c=3.0: dual clip is ppo's"),
        (cispo_loss, {"clip_ratio_c": 3.0}, "clip_ratio_c=3.0: dual clip is ppo's"),
        (gspo_loss, {"clip_ratio_low": -1.0}, "clip_ratio_low=-1.0"),
        (cispo_loss, {"clip_ratio_high": float("inf")}, "clip_ratio_high=inf"),
        (value_loss, {"cliprange_value": 0.0}, "cliprange_value=0.0"),
        (value_loss, {"cliprange_value": float("nan")}, "cliprange_value=nan"),
        (value_loss, {"loss_agg_mode": "mean"}, "loss_agg_mode='mean'"),
    ],
)
def test_options_of_another_surrogate_or_out_of_range_are_refused(
    loss_fn: Any, options: dict[str, Any], message: str
) -> None:
    sequences = random_sequences(34)
    with pytest.raises(ConfigError, match=message):
        loss_fn(*pack(sequences, batch_meta(sequences)), **options)


def test_a_critic_without_values_or_fields_is_refused_with_what_to_do() -> None:
    sequences = random_sequences(35)
    output, batch = pack(sequences, batch_meta(sequences))
    with pytest.raises(BatchError, match="build_model"):
        value_loss(ModelOutput(output.log_probs), batch)
    for name, options in (("returns", {}), ("loss_mask", {}), ("old_values", {})):
        fields = {key: value for key, value in batch.token_fields.items() if key != name}
        with pytest.raises(BatchError, match=f"'{name}' is missing"):
            value_loss(output, PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta), **options)
    fields = {key: value for key, value in batch.token_fields.items() if key != "old_values"}
    batch = PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta)
    _, metrics = value_loss(output, batch, cliprange_value=None)
    assert "value_clip_fraction" not in metrics
