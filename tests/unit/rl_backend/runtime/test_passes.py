"""What the micro-batches of one pass give together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_backend.contracts import ModelOutput, PackedBatch
from rl_backend.runtime.passes import PassRequest, PassResults
from tests.support.native import LENGTHS, micro_batches

SPLIT = [[0, 1], [5], [2, 3, 4]]
GROUP: Any = None


def index_loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """The micro-batch's sum of its outputs; metrics with and without a weight."""
    assert model_output.log_probs is not None
    total = model_output.log_probs.sum()
    return total, {"weighted": (total, torch.tensor(2.0)), "plain": data.num_sequences}


def output_of(index: int, length: int) -> ModelOutput:
    values = torch.arange(length, dtype=torch.float32) + 1000 * index
    return ModelOutput(log_probs=values.requires_grad_(), values=-values)


def test_outputs_come_in_the_order_of_the_request_whatever_the_schedule() -> None:
    data = micro_batches(SPLIT)
    results = PassResults(PassRequest(data, index_loss, forward_only=False), GROUP, keeps_outputs=True)
    outputs = [output_of(index, len(batch.input_ids)) for index, batch in enumerate(data)]
    for index in (2, 0, 1):
        loss = results.add(index, data[index], outputs[index])
        assert loss is not None and loss.requires_grad
    found = results.result({"routes": [torch.tensor(7)]})
    sums = [output.log_probs.sum().item() for output in outputs if output.log_probs is not None]
    assert list(found.losses) == sums
    assert found.outputs.keys() == {"log_probs", "values", "routes"} and found.outputs["routes"] == [torch.tensor(7)]
    assert [len(each) for each in found.outputs["log_probs"]] == [LENGTHS[index] for of in SPLIT for index in of]
    joined = torch.cat([output.log_probs.detach() for output in outputs if output.log_probs is not None])
    assert torch.equal(torch.cat(list(found.outputs["log_probs"])), joined)
    assert torch.equal(torch.cat(list(found.outputs["values"])), -joined)
    assert not any(each.requires_grad for each in found.outputs["log_probs"])
    assert found.metrics["weighted"] == (sum(sums), 6.0)
    assert found.metrics["plain"] == (6.0, 3.0)


def test_a_rank_that_keeps_no_outputs_gives_losses_alone() -> None:
    data = micro_batches(SPLIT)
    results = PassResults(PassRequest(data, index_loss, forward_only=False), GROUP, keeps_outputs=False)
    for index, batch in enumerate(data):
        results.add(index, batch, output_of(index, len(batch.input_ids)))
    found = results.result({})
    assert len(found.losses) == 3 and not found.outputs
    nothing = PassResults(PassRequest(data, None, forward_only=True), GROUP, keeps_outputs=True)
    assert nothing.add(0, data[0], output_of(0, len(data[0].input_ids))) is None
    assert nothing.result({}).losses == () and nothing.result({}).metrics == {}
