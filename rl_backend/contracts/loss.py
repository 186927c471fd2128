"""Losses: what they see and return, the same for every runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rl_backend.contracts.batch import PackedBatch


class ModelOutput(NamedTuple):
    """Outputs of one micro-batch of T tokens, on complete sequences. A field that was not asked for is None.

    Attributes:
        log_probs: (T,) float32, of the next token at the batch's temperature; 0 at each sequence's last position.
        entropy: (T,) float32, nats, of the distribution that ``log_probs`` is taken from; 0 at last positions.
        values: (T,) float32, of each token's state.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


class Metric(NamedTuple):
    """A mean as (sum, weight): adding both over micro-batches and ranks keeps the mean right when they are uneven."""

    sum: float
    weight: float

    @property
    def mean(self) -> float:
        return self.sum / self.weight if self.weight else float("nan")

    def merge(self, other: Metric) -> Metric:
        return Metric(self.sum + other.sum, self.weight + other.weight)


type MetricValue = float | Tensor | Metric | tuple[Tensor | float, Tensor | float]


class LossFn(Protocol):
    """A loss.

    Losses of micro-batches are summed and gradients are averaged over the data-parallel ranks; nothing is divided by the
    number of micro-batches. A mean over all tokens of all ranks is therefore
    ``(loss * mask).sum() / meta["batch_num_tokens"] * meta["dp_size"]``.

    Returns:
        a 0-d loss with a gradient (None only in a forward-only pass), and metrics by name: a (sum, weight) pair, or a bare
        number, which counts with weight 1.
    """

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor | None, Mapping[str, MetricValue]]: ...
