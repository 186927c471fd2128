"""What a loss returned, checked and detached; the same for every runtime."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rl_backend.contracts import BatchError, Metric, MetricValue


def check_loss(loss: object, index: int, forward_only: bool) -> None:
    """Raises :class:`BatchError` unless ``loss`` is a 0-d tensor, with a gradient or for a forward-only pass."""
    if loss is None and forward_only:
        return
    if not isinstance(loss, Tensor):
        raise BatchError(f"loss_fn returned a {type(loss).__name__} for micro-batch {index}; expected a 0-d tensor")
    if loss.dim() != 0:
        raise BatchError(f"loss_fn returned shape {tuple(loss.shape)} for micro-batch {index}; expected a 0-d tensor")
    if not forward_only and not loss.requires_grad:
        raise BatchError(
            f"loss_fn returned a loss without a gradient for micro-batch {index}; compute it from model_output, or pass "
            "forward_only=True"
        )


def detached(metrics: Mapping[str, MetricValue]) -> Mapping[str, MetricValue]:
    """The same metrics without their graphs."""

    def detach(value: Tensor | float) -> Tensor | float:
        return value.detach() if isinstance(value, Tensor) else value

    return {
        name: (detach(value[0]), detach(value[1])) if isinstance(value, tuple) else detach(value)
        for name, value in metrics.items()
    }


def as_metrics(values: Mapping[str, MetricValue]) -> dict[str, Metric]:
    """Metrics as (sum, weight) on the host; raises :class:`BatchError` for one that is no number."""
    metrics = {}
    for name, value in values.items():
        total, weight = value if isinstance(value, tuple) else (value, 1.0)
        try:
            metrics[name] = Metric(float(total), float(weight))
        except (RuntimeError, TypeError, ValueError) as error:
            raise BatchError(f"metric {name!r} is not a number or a (sum, weight) pair: {error}", name=name) from None
    return metrics
