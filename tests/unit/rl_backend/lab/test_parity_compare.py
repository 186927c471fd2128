"""Records of two sides that are made by hand, and what a comparison says of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.data import MicroBatchPlan
from rl_backend.lab.parity.compare import (
    Comparison,
    RankRecord,
    StepNumbers,
    Tolerances,
    activation_difference,
    compare,
    merge_ranks,
    number_difference,
    tensor_difference,
)
from tests.support.parity_records import MODULES, SAME, TOLERANCES, compared, record, times, values


@pytest.mark.parametrize(
    ("changes", "stage", "name", "step"),
    [
        ({"loaded_weights": times(SAME.loaded_weights, "b", 1 + 1e-6)}, "loaded weights", "b", 0),
        ({"activations": times(SAME.activations, "layer.1", 1 + 2e-6)}, "activations", "layer.1", 0),
        ({"activations": times(SAME.activations, "layer.0.mlp", 1 + 2e-6)}, "activations", "layer.0.mlp", 0),
        ({"log_probs": SAME.log_probs * (1 + 3e-5)}, "log-probs", "", 0),
        ({"losses": [2.0 + 5e-6, 1.5, 1.0]}, "loss", "", 0),
        ({"losses": [2.0, 1.5, 1.0 + 2e-6]}, "loss", "", 2),
        ({"grad_norms": [4.0, 3.0 + 6e-5, 2.0 + 1.0]}, "grad norm", "", 1),
        ({"gradients": times(SAME.gradients, "a", 1 + 2e-4)}, "gradient", "a", 0),
        ({"gradients": {**times(SAME.gradients, "a", 2.0), "b": -SAME.gradients["b"]}}, "gradient", "b", 0),
        ({"weights": times(SAME.weights, "a", 1 + 1e-5)}, "weights", "a", 0),
        ({"weights": {"a": SAME.weights["a"]}}, "weights", "b", 0),
        ({"log_probs": SAME.log_probs * (1 + 3e-5), "losses": [3.0, 2.0, 1.0]}, "log-probs", "", 0),
    ],
)
def test_the_first_stage_that_parts_is_named(changes: dict[str, Any], stage: str, name: str, step: int) -> None:
    found = compared(record(**changes)).first_divergence
    assert found is not None and (found.stage, found.difference.name, found.step) == (stage, name, step)
    assert str(found).startswith(f"{' '.join(filter(None, (stage, name)))} (step {step}): ")


def test_what_is_the_same_has_no_difference_and_is_counted() -> None:
    found = compared(record())
    assert found.first_divergence is None
    counted = {stage.stage: stage.compared for stage in found.stages}
    assert list(counted.items()) == [
        ("loaded weights", 2),
        ("activations", 4),
        ("log-probs", 1),
        ("loss", 1),
        ("gradient", 2),
        ("grad norm", 1),
        ("weights", 2),
    ]
    assert all(stage.largest.amount == 0.0 and stage.first_over is None for stage in found.stages)
    assert (found.loss_fall, found.max_loss_difference, found.max_grad_norm_difference) == (0.5, 0.0, 0.0)
    other = compared(record(losses=[2.0 + 4e-7, 1.5, 1.0 - 7e-7], grad_norms=[4.0, 3.0 + 3e-6, 2.0]))
    assert other.max_loss_difference == pytest.approx(7e-7) and other.max_grad_norm_difference == pytest.approx(1e-6)
    assert [(step.step, step.loss, step.grad_norm) for step in other.steps][1] == (1, (1.5, 1.5), (3.0, 3.0 + 3e-6))


def test_a_module_of_one_side_is_not_compared_unless_both_must_have_it() -> None:
    more = {"extra": values(1, 6, 4), **SAME.activations}
    del more["layer.0.mlp"]
    found = compared(record(activations=more))
    assert found.first_divergence is None and found.stages[1].not_compared == ("layer.0.mlp", "extra")
    del more["layer.0"]
    stage = compared(record(activations=more)).stages[1]
    assert stage.first_over is not None and stage.first_over.missing_from == "candidate" and stage.compared == 2
    stage = compared(record(), record(activations=more)).stages[1]
    assert stage.first_over is not None and stage.first_over.missing_from == "reference"


def test_a_module_that_ends_elsewhere_counts_in_nothing_where_all_that_follows_agrees() -> None:
    scaled = record(activations=times(SAME.activations, "layer.0.mlp", 3.0))
    found = compared(scaled)
    assert found.first_divergence is None
    assert [each.name for each in found.stages[1].ends_elsewhere] == ["layer.0.mlp"] and found.stages[1].compared == 3
    # Not where results differ, nor where the next layer does, nor where it is but a little.
    with_gradient = dataclasses.replace(scaled, gradients=times(SAME.gradients, "a", 1.1))
    next_too = record(activations=times(scaled.activations, "layer.1", 1.1))
    little = record(activations=times(SAME.activations, "layer.0.mlp", 1 + 9e-4))
    for candidate in (with_gradient, next_too, little):
        divergence = compared(candidate).first_divergence
        assert divergence is not None and (divergence.stage, divergence.difference.name) == ("activations", "layer.0.mlp")
    several = times(times(SAME.activations, "layer.0.mlp", 3.0), "embed", 3.0)
    assert [each.name for each in compared(record(activations=several)).stages[1].ends_elsewhere] == ["embed", "layer.0.mlp"]


def test_weights_whose_gradients_are_rounding_may_move_either_way() -> None:
    gradients = {"a": SAME.gradients["a"].clone(), "b": SAME.gradients["b"].clone()}
    gradients["a"][0, 0], gradients["a"][1, 1] = 1e-7, 0.0
    moved = {name: value - 1e-3 * gradients[name].sign() for name, value in SAME.loaded_weights.items()}
    reference = record(gradients=gradients, weights=moved)
    other = {"a": moved["a"].clone(), "b": moved["b"]}
    other["a"][0, 0] += 2e-3
    assert compared(record(gradients=gradients, weights=other), reference).first_divergence is None
    # An element that no token reaches is 0 on both sides, and must not move.
    other["a"][1, 1] += 2e-3
    found = compared(record(gradients=gradients, weights=other), reference).first_divergence
    assert found is not None and (found.stage, found.difference.name) == ("weights", "a")
    other["a"][1, 1] -= 2e-3
    other["a"][0, 1] += 2e-3
    assert compared(record(gradients=gradients, weights=other), reference).first_divergence is not None
    # Where rounding is all there is, the weight must be finite.
    tiny = {"a": gradients["a"], "b": torch.full((7,), 1e-9)}
    for value, diverges in ((5.0, False), (math.nan, True)):
        weights = {"a": moved["a"], "b": torch.full((7,), value)}
        given = record(gradients=tiny, weights=weights)
        found = compared(given, record(gradients=tiny, weights=moved)).first_divergence
        assert (found is not None) is diverges


@pytest.mark.parametrize(("step", "growth"), [(0, 1), (4, 1), (5, 10), (19, 10), (20, 100), (79, 100), (80, 1000)])
def test_tolerances_of_losses_grow_with_the_steps(step: int, growth: int) -> None:
    loss, norm = Tolerances.of("bfloat16", 3.0).at_step(step)
    assert (loss, norm) == pytest.approx((6e-3 * growth, 3e-2 * growth))


def test_a_factor_multiplies_all_tolerances_but_that_of_loading() -> None:
    assert Tolerances.of("bfloat16", 2.0) == pytest.approx((4e-3, 1e-1, 4e-2, 4e-1, 4e-1, 4e-3, 2e-2, 4e-2, 2e-1))
    assert Tolerances.of("float32") == (0.0, 1e-5, 1e-5, 1e-4, 5e-4, 1e-6, 1e-5, 1e-5, 1e-3)


@pytest.mark.parametrize(
    ("reference", "candidate", "amount", "missing"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]), 0.2, None),
        (torch.zeros(2), torch.zeros(2), 0.0, None),
        (torch.zeros(2), torch.tensor([0.0, 1.0]), math.inf, None),
        (torch.ones(2), torch.ones(2, 1), math.inf, None),
        (torch.ones(2), torch.tensor([1.0, math.nan]), math.inf, None),
        (None, torch.ones(2), math.inf, "reference"),
        (torch.ones(2), None, math.inf, "candidate"),
        (None, None, math.inf, "both"),
        (torch.ones(0), torch.ones(0), math.inf, "both"),
        (torch.ones(0), None, math.inf, "both"),
    ],
)
def test_a_difference_of_tensors_is_relative_to_the_reference(
    reference: Tensor | None, candidate: Tensor | None, amount: float, missing: Any
) -> None:
    found = tensor_difference("x", reference, candidate, 0.1)
    assert found.amount == pytest.approx(amount)
    assert (found.name, found.missing_from) == ("x", missing)
    assert found.over == (amount > 0.1)
    whole = activation_difference("x", reference, candidate, 0.1)
    assert whole.missing_from == missing and whole.over == found.over


def test_differences_say_what_they_are() -> None:
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])
    found = tensor_difference("x", first, second, 0.01, least_scale=50.0)
    assert (found.amount, found.max_abs_difference, found.excess) == pytest.approx((0.02, 1.0, 2.0))
    assert str(found) == "relative difference 2.0e-02 over the tolerance 1e-02"
    assert str(tensor_difference("x", first, None, 0.1)) == "the candidate does not have it"
    assert str(tensor_difference("x", None, None, 0.1)) == "nothing to compare: neither side has it"
    assert str(number_difference(1.0, math.nan, 0.1)) == "one side has another shape or values that are not finite"
    number = number_difference(-4.0, -5.0, 0.25)
    assert (number.amount, number.max_abs_difference, number.over) == (0.25, 1.0, False)
    exact = number_difference(1.0, 1.0, 0.0), number_difference(1.0, 1.1, 0.0)
    assert [each.excess for each in exact] == [0.0, math.inf] and number_difference(0.0, 0.0, 0.1).amount == 0.0


def rank(dp_rank: int, rows: list[Tensor], loss: float, *, source: bool = True, **changes: Any) -> RankRecord:
    activations = [{"m": row.view(-1, 1), "n": row.view(-1, 1) + 1} for row in rows]
    made = RankRecord(dp_rank, source, activations, rows, [loss, 2 * loss], [3.0, 4.0], {"w": torch.ones(1)})
    return dataclasses.replace(made, **changes)


def test_a_side_is_put_together_in_the_order_of_its_sequences() -> None:
    rows = [torch.full((length,), float(length)) for length in (1, 2, 3)]
    plan = MicroBatchPlan((((2,), (0,)), ((1,), ())))
    ranks = [rank(1, [], 99.0, source=False), rank(1, [rows[1]], 1.0), rank(0, [rows[2], rows[0]], 4.0)]
    ranks[2].activations[1].pop("n")  # type: ignore[attr-defined]
    side = merge_ranks(ranks, plan)
    assert side.log_probs.tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert side.activations.keys() == {"m"} and side.activations["m"].view(-1).tolist() == side.log_probs.tolist()
    assert (side.losses, side.grad_norms) == ([2.5, 5.0], [3.0, 4.0]) and side.loaded_weights["w"].tolist() == [1.0]


def test_what_the_reference_differs_from_itself_is_allowed_threefold_from_then_on() -> None:
    """Its loss is off by 1e-4 in the second step and by nothing in the third."""
    again = StepNumbers([2.0, 1.5 * (1 + 1e-4), 1.0], [4.0, 3.0, 2.0])

    def losses(second: float, third: float) -> Comparison:
        off = record(losses=[2.0, 1.5 * (1 + second), 1.0 + third])
        return compare(record(), off, TOLERANCES, MODULES, again)

    allowed = losses(2.9e-4, 2.9e-4)
    assert allowed.first_divergence is None
    assert [step.loss_difference.tolerance for step in allowed.steps] == pytest.approx([1e-6, 3e-4, 3e-4])
    assert allowed.largest_floor == pytest.approx((1e-4, 0.0)) and allowed.largest_alone is None
    found = losses(0.0, 3.1e-4).first_divergence
    assert found is not None and (found.stage, found.step, found.alone) == ("loss", 2, False)


@pytest.mark.parametrize(("stage", "loss", "norm"), [("loss", 1.1e-5, 0.0), ("grad norm", 0.9e-5, 1.1e-3)])
def test_a_step_that_starts_from_the_same_weights_is_judged_alone(stage: str, loss: float, norm: float) -> None:
    """The same trajectory in the running comparison, so that nothing else is over."""
    again = StepNumbers(SAME.losses, SAME.grad_norms)
    alone = StepNumbers([1.5, 1.0 + loss], [3.0, 2.0 * (1 + norm)])
    comparison = compare(SAME, record(), TOLERANCES, MODULES, again, alone)
    found = comparison.first_divergence
    assert found is not None and (found.stage, found.step, found.alone) == (stage, 2, True)
    assert comparison.steps[0].alone is None
    assert comparison.largest_alone == pytest.approx((loss, norm))


def test_the_floor_of_a_later_step_excuses_nothing_in_the_first() -> None:
    again = StepNumbers([2.1, 1.6, 1.1], [4.0, 3.0, 2.0])
    off = record(losses=[2.0 * (1 + 1e-5), 1.5, 1.0])
    found = compare(record(), off, TOLERANCES, MODULES, again).first_divergence
    assert found is not None and (found.stage, found.step) == ("loss", 0)
