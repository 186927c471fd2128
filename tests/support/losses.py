"""Losses that tests of training groups send by name."""

from __future__ import annotations

import time
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


def slow_loss(
    model_output: ModelOutput, data: PackedBatch, dp_group: Any = None, *, seconds: float
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """As :func:`nll_loss`, after computing for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(100_000))
    return nll_loss(model_output, data, dp_group)


class ScaledLoss:
    """A callable whose state its owner changes between steps."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor, Mapping[str, MetricValue]]:
        return nll_loss(model_output, data, dp_group, scale=self.scale)
