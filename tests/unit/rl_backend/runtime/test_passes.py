"""What a pass is asked and what it answers: by micro-batch, in whatever order these were computed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BatchError, Metric, ModelOutput, PackedBatch, UnsupportedError
from rl_backend.runtime.interface import REPLAY_MODES
from rl_backend.runtime.passes import PassRequest, PassResults

LENGTHS = ([2, 1], [3], [1, 4, 2])
DATA = [PackedBatch(torch.arange(sum(lengths)), torch.tensor(lengths)) for lengths in LENGTHS]
GROUP: Any = "the data-parallel group"


def output(index: int, **others: Tensor | None) -> ModelOutput:
    """Each token has a number of its own."""
    tokens = torch.arange(DATA[index].num_tokens, dtype=torch.float32, requires_grad=True)
    return ModelOutput(**{"log_probs": 100.0 * index + tokens, **others})


def adapters(fingerprint: int = 0) -> Any:
    begun: list[Any] = []
    return SimpleNamespace(
        fingerprint=lambda data: fingerprint + len(data),
        heads=("log_probs", "values"),
        runs=lambda index, batch, sequence_rows: (index, batch, tuple(sequence_rows)),
        begin=begun.append,
        begun=begun,
    )


def test_every_kind_of_pass_has_another_number() -> None:
    found = [
        PassRequest(DATA, None, forward_only, mode, given).kind
        for forward_only in (False, True)
        for mode in REPLAY_MODES
        for given in (None, adapters(), adapters(1), adapters(2**32 - 4))
    ]
    assert len(set(found)) == len(found) == 24
    assert all(0 <= kind < 2**63 for kind in found), "ranks compare them as int64, and their negatives"
    assert PassRequest(DATA, None, True, "replay").kind == 5


def test_a_pass_asks_its_adapters_of_all_its_data_and_has_none_without() -> None:
    mine = adapters()
    asked = PassRequest(DATA, None, False, adapters=mine)
    runs: Any = asked.runs(2, DATA[2], [1, 4, 2])
    assert runs == (2, DATA[2], (1, 4, 2))
    assert asked.heads == ("log_probs", "values")
    asked.begin()
    assert mine.begun == [DATA]
    without = PassRequest(DATA, None, False)
    without.begin()
    assert without.runs(0, DATA[0], [1]) == () and without.heads == ()


def results(loss_fn: Any, *, forward_only: bool = False, keeps_outputs: bool = True) -> PassResults:
    return PassResults(PassRequest(DATA, loss_fn, forward_only), GROUP, keeps_outputs)


def test_answers_are_in_the_order_of_the_request_whatever_was_computed_first() -> None:
    def loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any) -> Any:
        assert dp_group == GROUP and model_output.log_probs is not None
        total = model_output.log_probs.sum()
        kl = torch.tensor(float(data.num_tokens), requires_grad=True)
        return total, {"kl": (kl, data.num_sequences), "one": 1, "plain": Metric(2.0, 4.0)}

    found = results(loss)
    for index in (1, 2, 0):
        returned = found.add(index, DATA[index], output(index, entropy=torch.zeros(DATA[index].num_tokens)))
        assert returned is not None and returned.requires_grad
    routes = [torch.zeros(1)]
    answer = found.result({"routed_experts": routes})
    # Sums of 0 to n - 1, and of 100 times the micro-batch for each token.
    assert answer.losses == (3.0, 3 + 300.0, 21 + 1400.0)
    assert answer.metrics == {"kl": Metric(13.0, 6.0), "one": Metric(3.0, 3.0), "plain": Metric(6.0, 12.0)}
    expected = [[0, 1], [2], [100, 101, 102], [200], [201, 202, 203, 204], [205, 206]]
    assert [value.tolist() for value in answer.outputs["log_probs"]] == expected
    assert [value.shape[0] for value in answer.outputs["entropy"]] == list(map(len, expected))
    assert sorted(answer.outputs) == ["entropy", "log_probs", "routed_experts"]
    assert answer.outputs["routed_experts"] is routes
    storages = {value.untyped_storage().data_ptr() for value in answer.outputs["log_probs"]}
    assert len(storages) == 6 and not any(value.requires_grad for value in answer.outputs["log_probs"])


def test_a_rank_without_outputs_has_losses_and_metrics_alone_and_a_pass_without_a_loss_outputs_alone() -> None:
    losing = results(lambda *_: (torch.tensor(2.5, dtype=torch.bfloat16), {}), forward_only=True, keeps_outputs=False)
    assert losing.add(0, DATA[0], output(0)) is not None
    answer = losing.result({})
    assert (answer.losses, dict(answer.outputs), answer.metrics) == ((2.5,), {}, {})
    looking = results(None, forward_only=True)
    assert looking.add(1, DATA[1], output(1)) is None
    answer = looking.result({})
    assert (answer.losses, answer.metrics) == ((), {}) and len(answer.output("log_probs")) == 1
    unsaid = results(lambda *_: (None, {"n": 2}), forward_only=True)
    assert unsaid.add(1, DATA[1], output(1)) is None
    assert unsaid.result({}).losses == () and unsaid.result({}).metrics == {"n": Metric(2.0, 1.0)}


@pytest.mark.parametrize(
    ("loss", "forward_only", "message"),
    [
        (None, False, r"loss_fn for micro-batch 2 returned None; expected a 0-d tensor"),
        (0.5, True, r"for micro-batch 2 returned 0.5; expected a 0-d tensor"),
        (
            torch.ones(1, requires_grad=True),
            False,
            r"for micro-batch 2 returned tensor\(\[1.\], requires_grad=True\); expected",
        ),
        (torch.ones(2, 3), True, r"for micro-batch 2 returned tensor\(\[\[1., 1., 1.\]"),
        (torch.ones(()), False, r"for micro-batch 2 returned tensor\(1.\); expected a 0-d tensor with a grad"),
        (torch.ones(()), True, None),
        (torch.ones((), requires_grad=True), False, None),
    ],
    ids=str,
)
def test_a_loss_is_a_number_with_a_gradient_where_one_is_needed(loss: Any, forward_only: bool, message: str | None) -> None:
    found = results(lambda *_: (loss, {}), forward_only=forward_only)
    if message is None:
        assert found.add(2, DATA[2], output(2)) is loss
        return
    with pytest.raises(BatchError, match=message):
        found.add(2, DATA[2], output(2))


@pytest.mark.parametrize(
    "value",
    ["many", torch.ones(2), (torch.ones(3), 1.0), (1.0, None), [1.0], (1, 2, 3), (1.0,), torch.ones((), dtype=torch.cfloat)],
    ids=["text", "rows", "sum", "weight", "list", "three", "one", "complex"],
)
def test_a_metric_that_is_no_number_is_refused_by_its_name_wherever_it_stands(value: Any) -> None:
    for metrics in ({"bad": value, "good": 1.0}, {"good": 1.0, "bad": value}):
        found = results(lambda *_, metrics=metrics: (torch.ones((), requires_grad=True), metrics))
        message = r"^loss_fn for micro-batch 0: metrics must be a dict of numbers or \(sum, weight\) pairs; found \{'bad': "
        with pytest.raises(BatchError, match=message):
            found.add(0, DATA[0], output(0))


def test_metrics_are_a_mapping() -> None:
    found = results(lambda *_: (torch.ones((), requires_grad=True), None))
    with pytest.raises(BatchError, match=r"for micro-batch 0: metrics must be a dict of numbers .*; found None"):
        found.add(0, DATA[0], output(0))


def test_an_output_that_is_not_one_number_for_each_token_is_refused() -> None:
    found = results(lambda *_: (torch.ones((), requires_grad=True), {}))
    for name, shape in (("values", (7, 1)), ("entropy", (1,)), ("values", ())):
        with pytest.raises(UnsupportedError) as caught:
            found.add(2, DATA[2], output(2, **{name: torch.zeros(shape)}))
        assert str(caught.value) == f"the model returned {name} of shape {shape} for micro-batch 2; expected (7,)"


def test_a_model_that_does_not_give_what_the_meta_asks_for_is_refused() -> None:
    found = results(lambda *_: (torch.ones((), requires_grad=True), {}))
    top: dict[str, Tensor | None] = {"top_ids": torch.zeros(7, 3, dtype=torch.int64), "top_log_probs": torch.zeros(7, 3)}
    asked = replace(DATA[2], meta={"top_log_probs": 3, "top_p": 0.5})
    for missing, shape in (("top_ids", "(7, 3)"), ("top_log_probs", "(7, 3)"), ("mask_disagreement", "(7,)")):
        with pytest.raises(UnsupportedError) as caught:
            found.add(2, asked, output(2, **{**top, "mask_disagreement": torch.zeros(7), missing: None}))
        assert str(caught.value) == f"the model returned {missing} of shape None for micro-batch 2; expected {shape}"
    found.add(2, asked, output(2, **top, mask_disagreement=torch.zeros(7)))
    found.add(2, asked, ModelOutput(values=torch.zeros(7)))


def test_log_probs_of_several_targets_have_a_column_for_each() -> None:
    data = replace(DATA[2], token_fields={"target_ids": torch.zeros(7, 3, dtype=torch.int64)})
    found = results(None, forward_only=True)
    found.add(2, data, ModelOutput(log_probs=torch.arange(21.0).view(7, 3), values=torch.zeros(7)))
    parts = found.result({}).output("log_probs")
    assert [tuple(part.shape) for part in parts] == [(1, 3), (4, 3), (2, 3)] and parts[1][0].tolist() == [3.0, 4.0, 5.0]
    for shape in ((7,), (7, 2), (7, 1), (3, 7)):
        with pytest.raises(UnsupportedError, match=r"log_probs of shape \(.*; expected \(7, 3\)$"):
            found.add(2, data, ModelOutput(log_probs=torch.zeros(shape)))


def test_tokens_that_were_computed_are_counted_over_all_micro_batches() -> None:
    found = results(lambda *_: (torch.ones((), requires_grad=True), {"n": 2}))
    for index, computed in ((2, 5), (0, 3), (1, 2)):
        found.add(index, DATA[index], output(index), computed)
    # Of 3, 3 and 7 tokens.
    assert found.result({}).metrics == {"tokens_computed": Metric(10, 13), "n": Metric(6.0, 3.0)}
