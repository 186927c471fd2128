"""Reductions by mask and sequence, and what losses read: shapes, denominators and their absence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_backend.algorithm.loss_aggregation import (
    LOSS_AGG_MODES,
    aggregate_loss,
    aggregation_terms,
    broadcast_to_tokens,
    check_finite,
    check_loss_agg_mode,
    check_not_negative,
    check_packed,
    differentiable_entropy,
    masked_sum,
    required_output,
    sum_by_sequence,
    token_advantages,
    token_mean_metric,
    token_vector,
    zero_masked,
)
from rl_backend.contracts import EPISODE_SHARE, BatchError, ConfigError, ModelOutput, PackedBatch

NAN = float("nan")
LOSSES = torch.tensor([1.0, 2.0, NAN, 4.0, NAN, 8.0, 16.0])
WEIGHTS = torch.tensor([1.0, 0.5, 0.0, 1.0, 0.0, 2.0, 0.25])
LENGTHS = torch.tensor([3, 1, 1, 2])
"""The third sequence has no selected token."""
SUMS = [2.0, 4.0, 0.0, 20.0]
COUNTS = [1.5, 1.0, 1.0, 2.25]


def batch(**fields: Any) -> PackedBatch:
    meta = {"batch_num_tokens": 10.0, "global_batch_size": 5, "dp_size": 3}
    return PackedBatch(torch.arange(7), LENGTHS, {"loss_mask": WEIGHTS}, fields, meta)


def test_masked_values_are_never_read_and_weights_count() -> None:
    assert zero_masked(LOSSES, WEIGHTS).tolist() == [1.0, 2.0, 0.0, 4.0, 0.0, 8.0, 16.0]
    assert zero_masked(torch.tensor([NAN, -1.0]), torch.tensor([0.0, -1.0])).tolist() == [0.0, -1.0]
    assert masked_sum(LOSSES, WEIGHTS).item() == sum(SUMS)
    total, weight = token_mean_metric(LOSSES.clone().requires_grad_(), WEIGHTS)
    assert (total.item(), weight.item()) == (26.0, 4.75) and not total.requires_grad
    _, weight = token_mean_metric(LOSSES.double(), WEIGHTS != 0)
    assert weight.item() == 5.0 and weight.dtype == torch.float64


def test_sums_and_broadcasts_go_by_the_lengths_of_sequences() -> None:
    values = torch.arange(7.0, requires_grad=True)
    sums = sum_by_sequence(values, LENGTHS)
    assert sums.tolist() == [3.0, 3.0, 4.0, 11.0]
    (gradient,) = torch.autograd.grad((sums * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(), values)
    assert gradient.tolist() == [1, 1, 1, 2, 3, 4, 4]
    assert broadcast_to_tokens(torch.tensor([5, 6, 7, 8]), LENGTHS).tolist() == [5, 5, 5, 6, 7, 8, 8]
    for shape in ((3,), (5,), (4, 2)):
        with pytest.raises(RuntimeError, match="repeats must have the same size"):
            broadcast_to_tokens(torch.zeros(shape), LENGTHS)


@pytest.mark.parametrize("shape", [(6,), (8,), (7, 1), ()])
def test_a_tensor_that_does_not_fit_is_named_whichever_it_is(shape: tuple[int, ...]) -> None:
    check_packed(LENGTHS, a=torch.zeros(7), b=torch.zeros(7))
    for names in (("a", "bad"), ("bad", "a")):
        with pytest.raises(BatchError) as refused:
            check_packed(LENGTHS, **{name: torch.zeros(shape) if name == "bad" else torch.zeros(7) for name in names})
        assert str(refused.value) == f"bad has shape {shape}; expected (7,), the sum of seq_lens"
        assert refused.value.details == {"name": "bad"}


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_the_first_selected_entry_that_is_not_finite_is_named(bad: float) -> None:
    mask = torch.tensor([0, 1, 0, 2])
    check_finite(mask, a=torch.tensor([bad, 1.0, bad, 2.0]))
    for place in (1, 3):
        values = torch.zeros(4).index_fill(0, torch.tensor([0, place]), bad)
        with pytest.raises(BatchError, match=rf"^b\[{place}\] is {bad}; every selected token needs a finite one") as refused:
            check_finite(mask, a=torch.zeros(4), b=values)
        assert refused.value.details == {"name": "b"}


def test_outputs_that_a_loss_needs_are_asked_for() -> None:
    known = torch.zeros(7, requires_grad=True)
    fixed = torch.zeros(7)
    assert required_output(ModelOutput(known), "log_probs") is known
    assert required_output(ModelOutput(values=fixed), "values") is fixed
    assert differentiable_entropy(ModelOutput(known, known)) is known
    assert differentiable_entropy(ModelOutput(fixed, fixed)) is fixed
    for call, message in (
        (
            lambda: required_output(ModelOutput(values=known), "log_probs"),
            "has no log_probs; this loss needs a model with a language",
        ),
        (
            lambda: required_output(ModelOutput(known), "values"),
            r"no values; this loss needs a critic: build_model\(head='values'\)",
        ),
        (lambda: differentiable_entropy(ModelOutput(known)), "set meta.'calculate_entropy'. to True"),
        (
            lambda: differentiable_entropy(ModelOutput(known, fixed)),
            "an entropy with a gradient; this model gives it with",
        ),
    ):
        with pytest.raises(BatchError, match=message):
            call()


def test_advantages_of_tokens_come_before_those_of_sequences() -> None:
    of_sequences = torch.tensor([1.0, 2.0, 3.0, 4.0])
    mine = batch(advantages=of_sequences)
    assert token_advantages(mine).tolist() == [1, 1, 1, 2, 3, 4, 4]
    both = PackedBatch(mine.input_ids, LENGTHS, {"advantages": torch.arange(7.0)}, {"advantages": of_sequences})
    assert torch.equal(token_advantages(both), torch.arange(7.0))
    with pytest.raises(BatchError, match="'advantages' is missing"):
        token_advantages(batch())
    with pytest.raises(RuntimeError, match="repeats must have the same size"):
        token_advantages(batch(advantages=torch.zeros(4, 2)))
    wide = PackedBatch(mine.input_ids, LENGTHS, {"x": torch.zeros(7, 1)})
    with pytest.raises(BatchError, match=r"token field 'x' has shape \(7, 1\); expected \(T,\)") as refused:
        token_vector(wide, "x")
    assert refused.value.details == {"name": "x"}


@pytest.mark.parametrize("value", [-1e-9, NAN, float("inf")])
def test_an_option_that_is_negative_or_not_finite_is_named(value: float) -> None:
    check_not_negative(a=0.0, b=3.0)
    with pytest.raises(ConfigError, match=rf"^b={value!r}: must be a finite number, 0 or above"):
        check_not_negative(a=0.0, b=value)


@pytest.mark.parametrize(
    ("mode", "factor", "message"),
    [
        ("mean", None, f"loss_agg_mode='mean': must be one of {', '.join(LOSS_AGG_MODES)}"),
        ("seq-mean-token-sum-norm", None, "loss_scale_factor=None: loss_agg_mode='seq-mean-token-sum-norm' needs"),
        *(("seq-mean-token-sum-norm", bad, f"loss_scale_factor={bad!r}: loss_agg_mode='seq-mean-token-sum-norm' needs")
          for bad in (0.0, -1.0, NAN, float("inf"))),
        *((mode, 0.0, f"loss_scale_factor=0.0: loss_agg_mode={mode!r} does not use it") for mode in LOSS_AGG_MODES[:3]),
    ],
)  # fmt: skip
def test_a_mode_and_its_factor_must_fit(mode: str, factor: float | None, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_loss_agg_mode(mode, factor)
    assert str(refused.value).startswith(message)
    with pytest.raises(ConfigError):
        aggregation_terms(LOSSES, WEIGHTS, LENGTHS, mode, loss_scale_factor=factor)


@pytest.mark.parametrize("shares", [None, [0.5, 0.5, 1.0, 0.25]])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_terms_of_each_aggregation(mode: str, shares: list[float] | None) -> None:
    weighed = shares or [1.0] * 4
    means = [each / count * share for each, count, share in zip(SUMS, COUNTS, weighed, strict=True)]
    expected = {
        "token-mean": (26.0, 4.75),
        "sum": (26.0, 4.75),
        "seq-mean-token-sum": (26.0, sum(weighed)),
        "seq-mean-token-mean": (sum(means), sum(weighed)),
        "seq-mean-token-sum-norm": (26.0 / 4, sum(weighed)),
    }[mode]
    factor = 4.0 if mode.endswith("norm") else None
    share = None if shares is None else torch.tensor(shares, dtype=torch.float64)
    total, weight = aggregation_terms(LOSSES, WEIGHTS, LENGTHS, mode, loss_scale_factor=factor, episode_share=share)
    assert [total.item(), weight.item()] == pytest.approx(expected)
    fields = {} if share is None else {EPISODE_SHARE: share}
    loss = aggregate_loss(LOSSES, WEIGHTS, batch(**fields), mode, loss_scale_factor=factor)
    assert loss.item() == pytest.approx(expected[0] * 3 / {"token-mean": 10.0, "sum": 1.0}.get(mode, 5))


@pytest.mark.parametrize(("mode", "name"), [("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")])
def test_only_the_denominator_of_the_mode_is_read(mode: str, name: str) -> None:
    for value, message in (
        (0, rf"meta\['{name}'\] is 0; it must be above 0"),
        (-1, "must be above 0"),
        (NAN, "must be above 0"),
        (float("inf"), "must be above 0"),
        (None, rf"meta\['{name}'\] is None; it must be above 0.* the batch has \[.*'{name}'"),
    ):
        data = PackedBatch(torch.arange(7), LENGTHS, {}, {}, {name: value, "dp_size": 2})
        with pytest.raises(BatchError, match=message):
            aggregate_loss(LOSSES, WEIGHTS, data, mode)
    alone = PackedBatch(torch.arange(7), LENGTHS, {}, {}, {name: 13, "dp_size": 2})
    assert aggregate_loss(LOSSES, WEIGHTS, alone, mode).item() == pytest.approx(26.0 / 13 * 2)
    with pytest.raises(BatchError, match=r"meta\['dp_size'\] is None"):
        aggregate_loss(LOSSES, WEIGHTS, PackedBatch(torch.arange(7), LENGTHS, {}, {}, {name: 13}), mode)
