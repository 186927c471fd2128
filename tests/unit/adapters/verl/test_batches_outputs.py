"""Outputs of a runtime as verl takes them: rows in the batch's order, metrics in that of the micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from adapters.verl.batches import MicroBatch, MicroBatches, MicroBatchLoss, as_verl_output, jagged_outputs
from adapters.verl.engine_model import delta_entry, shards_with_specs
from rl_backend.contracts import ForwardResult, Metric, ModelOutput, PackedBatch, WeightShard


def packed(lengths: list[int], index: int = 0, **fields: Tensor) -> PackedBatch:
    data = TensorDict({"x": torch.tensor([float(index)])}, batch_size=[1])
    return PackedBatch(
        torch.zeros(sum(lengths), dtype=torch.int64),
        torch.tensor(lengths),
        token_fields=fields,
        payload=MicroBatch(index, data),
    )


def test_outputs_that_there_are_become_jagged_and_stay_differentiable() -> None:
    log_probs = torch.arange(6.0, requires_grad=True)
    found = jagged_outputs(ModelOutput(log_probs=log_probs, values=-log_probs), packed([1, 3, 2]))
    assert found.keys() == {"log_probs", "values"}
    assert [row.tolist() for row in found["log_probs"].unbind()] == [[0], [1, 2, 3], [4, 5]]
    assert [row.tolist() for row in found["values"].unbind()] == [[0], [-1, -2, -3], [-4, -5]]
    (found["log_probs"].values() * torch.arange(6.0)).sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [0, 1, 2, 3, 4, 5]
    assert jagged_outputs(ModelOutput(), packed([2])) == {}


def test_verls_loss_gets_its_own_micro_batch_and_its_metrics_lose_their_graphs() -> None:
    given: list[Any] = []

    def verls(**arguments: Any) -> tuple[Tensor, dict[str, Any]]:
        given.append(arguments)
        value = arguments["model_output"]["log_probs"].values().sum()
        return 3 * value, {"loss": value, "count": 2}

    loss = MicroBatchLoss(verls)
    log_probs = torch.ones(4, requires_grad=True)
    for index in (1, 0):
        value, metrics = loss(ModelOutput(log_probs=log_probs), packed([1, 3], index), "group")
        assert float(value.detach()) == 12 and value.requires_grad and metrics == {}
    assert [float(each["data"]["x"]) for each in given] == [1.0, 0.0]
    assert {each["dp_group"] for each in given} == {"group"}
    assert loss.metrics.keys() == {0, 1} and not loss.metrics[0]["loss"].requires_grad
    assert loss.metrics[1]["count"] == 2


def test_rows_are_those_of_verls_batch_and_metrics_those_of_its_micro_batches() -> None:
    order = [2, 0, 3, 1]
    sequences = [torch.full((row + 1,), float(row)) for row in order]
    routes = [torch.full((row + 1, 3, 2), row) for row in order]
    result = ForwardResult(
        losses=(0.5, 0.25),
        metrics={"tokens_computed": Metric(3, 12)},
        outputs={"log_probs": sequences, "routed_experts": routes},
    )
    masks = torch.tensor([True, False, True]), torch.tensor([True])
    batch = MicroBatches([packed([3], 0, routed_experts_mask=masks[0]), packed([1], 1, routed_experts_mask=masks[1])], order)
    loss: Any = SimpleNamespace(metrics={1: {"a": 10, "b": 30}, 0: {"a": 1}})
    found = as_verl_output(result, batch, loss)
    assert [row.tolist() for row in found["model_output"]["log_probs"].unbind()] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
    assert [row.shape for row in found["model_output"]["routed_experts"].unbind()] == [(row + 1, 3, 2) for row in range(4)]
    assert found["loss"] == [0.5, 0.25]
    fractions = {"router_replay/replayed_fraction": [0.75], "shared_prefixes/computed_fraction": [0.25]}
    assert found["metrics"] == {"a": [1, 10], "b": [30], **fractions}
    assert as_verl_output(result, batch, None)["metrics"] == {}


def test_without_a_loss_there_are_outputs_alone() -> None:
    mask = torch.tensor([True, False])
    batch = MicroBatches([packed([2], 0, routed_experts_mask=mask), packed([1], 1)], [1, 0])
    result = ForwardResult(outputs={"values": [torch.ones(2), torch.zeros(1)]})
    found = as_verl_output(result, batch, None)
    assert found["loss"] == [] and found["metrics"] == {}
    assert [row.tolist() for row in found["model_output"]["values"].unbind()] == [[0], [1, 1]]
    loss: Any = SimpleNamespace(metrics={0: {}, 1: {}})
    assert as_verl_output(result, MicroBatches([packed([2]), packed([1])], [1, 0]), loss)["metrics"] == {}
    one_masked = as_verl_output(result, batch, loss)["metrics"]
    assert one_masked == {"router_replay/replayed_fraction": [0.5]}
    with pytest.raises(ValueError, match="zip"):
        as_verl_output(result, MicroBatches(batch.packed, [1, 0, 2]), None)


def test_a_share_of_a_weight_is_a_block_of_it_and_its_changes_have_their_places_in_the_whole() -> None:
    whole = torch.arange(20.0).view(4, 5)
    shards = [
        WeightShard("a", (4, 5), (1, 2), whole[1:3, 2:]),
        WeightShard("b", (3,), (3,), torch.empty(0)),
    ]
    (name, tensor, spec), (empty_name, _, empty) = shards_with_specs(iter(shards))
    assert name == "a" and tensor is shards[0].tensor and empty_name == "b"
    assert (spec.full_shape, spec.contributes, empty.contributes, empty.full_shape) == ((4, 5), True, False, (3,))
    assert (spec.place.local_shape, spec.place.global_offset, spec.place.full_shape) == ((2, 3), (1, 2), (4, 5))
    changed = torch.tensor([0, 2, 4])
    slots, dtype, counts, places, values = delta_entry(
        "a", spec, spec.place, changed, tensor.reshape(-1)[changed].bfloat16()
    )
    assert (slots, dtype, counts.tolist()) == ([("a", (4, 5))], "bfloat16", [3])
    assert places.dtype == torch.int32 and whole.view(-1)[places.long()].tolist() == values.tolist() == [7, 9, 13]
    nothing = delta_entry("b", empty, empty.place, torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert nothing[0] == [("b", (3,))] and nothing[1] == "float32" and nothing[2].tolist() == [0] and not nothing[3].numel()
