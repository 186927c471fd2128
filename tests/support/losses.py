"""Losses that tests of training groups send by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_backend.contracts import Metric, MetricValue, ModelOutput, PackedBatch


def nll_loss(
    model_output: ModelOutput, data: PackedBatch, dp_group: Any = None, *, scale: float = 1.0
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Mean negative log-likelihood over all ``loss_mask`` tokens of all ranks, times ``scale``."""
    assert model_output.log_probs is not None
    mask = data.token_field("loss_mask")
    total = -(model_output.log_probs * mask).sum()
    loss = scale * total / data.meta["batch_num_tokens"] * data.meta["dp_size"]
    return loss, {"nll": Metric(float(total.detach()), float(mask.sum()))}


class ScaledLoss:
    """A callable whose state its owner changes between steps."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor, Mapping[str, MetricValue]]:
        return nll_loss(model_output, data, dp_group, scale=self.scale)
