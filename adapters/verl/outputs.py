"""A runtime's outputs as verl takes them: its losses during a pass, its workers after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from verl.utils.py_functional import append_to_dict
from verl.workers.engine.utils import detach_tree

from adapters.verl.micro_batches import MicroBatch, MicroBatches
from adapters.verl.timing import AdapterTime
from rl_backend.contracts import ForwardResult, ModelOutput, PackedBatch
from rl_backend.contracts.routed_experts import ROUTES_MASK

type VerlLoss = Callable[..., tuple[Tensor, Mapping[str, Any]]]
"""verl's ``loss(model_output=, data=, dp_group=)``. It is multiplied by ``dp_size``, so that gradients are averaged."""


class MicroBatchLoss:
    """verl's loss as a runtime calls it, on verl's own micro-batch.

    Attributes:
        metrics: of each micro-batch, as the loss returned them, without their graphs.
    """

    def __init__(self, loss: VerlLoss, time: AdapterTime) -> None:
        self._loss = loss
        self._time = time
        self.metrics: dict[int, Mapping[str, Any]] = {}

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor, Mapping[str, Any]]:
        with self._time.adapter_inside_runtime():
            micro_batch = data.payload
            assert isinstance(micro_batch, MicroBatch), "cut_batch packed it"
            given = micro_batch.data.to(data.device)
            outputs = jagged_outputs(model_output, data)
        loss, metrics = self._loss(model_output=outputs, data=given, dp_group=dp_group)
        self.metrics[micro_batch.index] = detach_tree(metrics)
        return loss, {}


def jagged_outputs(model_output: ModelOutput, data: PackedBatch) -> dict[str, Tensor]:
    """(T,) -> jagged (B, L_i) of every output that there is, differentiable."""
    offsets = data.cu_seqlens.to(torch.int64)
    return {
        name: torch.nested.nested_tensor_from_jagged(value, offsets)
        for name, value in model_output._asdict().items()
        if value is not None
    }


def as_verl_output(result: ForwardResult, batch: MicroBatches, loss: MicroBatchLoss | None) -> dict[str, Any]:
    """What ``forward_backward_batch`` returns on a source rank.

    Returns:
        ``model_output``: name -> jagged (B, L_i, ...), detached, in the order of verl's batch; ``loss``: one number for each
        micro-batch; ``metrics``: name -> what each micro-batch gave, and in a replay ``router_replay/replayed_fraction``, of
        this rank's tokens.
    """
    model_output = {}
    for name, sequences in result.outputs.items():
        rows: list[Tensor] = [sequences[0]] * len(batch.order)
        for row, sequence in zip(batch.order, sequences, strict=True):
            rows[row] = sequence
        model_output[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    metrics: dict[str, Any] = {}
    given = {} if loss is None else loss.metrics
    for index in sorted(given):
        append_to_dict(metrics, given[index])
    masks = [each.token_fields[ROUTES_MASK] for each in batch.packed if ROUTES_MASK in each.token_fields]
    if loss is not None and masks:
        metrics["router_replay/replayed_fraction"] = [float(torch.cat(masks).float().mean())]
    return {"model_output": model_output, "loss": list(result.losses), "metrics": metrics}
