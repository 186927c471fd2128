"""A pass in every engine: its request, and the losses, metrics and outputs of its micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rl_backend.contracts import (
    BatchError,
    ForwardResult,
    Head,
    LossFn,
    Metric,
    MetricValue,
    ModelOutput,
    PackedBatch,
    UnsupportedError,
    merge_metrics,
)
from rl_backend.primitive.adapter_runs import AdapterRun
from rl_backend.runtime.router_replay import MODES, RouterReplay


class PassAdapters(Protocol):
    """The adapters of a pass.

    Attributes:
        heads: the outputs of the pass, the same for all of its micro-batches and ranks.
    """

    heads: Sequence[Head]

    def runs(self, index: int, batch: PackedBatch, sequence_rows: Sequence[int]) -> tuple[AdapterRun, ...]:
        """Which adapters work on which rows of micro-batch ``index``; each sequence has ``sequence_rows`` on this rank."""
        ...

    def problem(self, data: Sequence[PackedBatch]) -> BatchError | None:
        """Why these adapters cannot work on this rank's micro-batches."""
        ...

    def fingerprint(self, data: Sequence[PackedBatch]) -> int:
        """Of what ranks with other sequences must have in common, up to 32 bits."""
        ...

    def begin(self, data: Sequence[PackedBatch]) -> None:
        """The micro-batches have been checked on every rank, and run next."""
        ...


class PassRequest(NamedTuple):
    """One ``forward_backward``, as the runtime asks for it.

    Attributes:
        data: micro-batches; checked.
        loss_fn: None in a forward-only pass without a loss.
        adapters: that work on the data; None without LoRA.
    """

    data: Sequence[PackedBatch]
    loss_fn: LossFn | None
    forward_only: bool
    router_replay: RouterReplay = "off"
    adapters: PassAdapters | None = None

    def runs(self, index: int, batch: PackedBatch, sequence_rows: Sequence[int]) -> tuple[AdapterRun, ...]:
        """As :meth:`PassAdapters.runs`."""
        return () if self.adapters is None else self.adapters.runs(index, batch, sequence_rows)

    def begin(self) -> None:
        """As :meth:`PassAdapters.begin`."""
        if self.adapters is not None:
            self.adapters.begin(self.data)

    @property
    def heads(self) -> Sequence[Head]:
        """As :attr:`~rl_backend.model.ModelInput.heads`."""
        return () if self.adapters is None else self.adapters.heads

    @property
    def kind(self) -> int:
        """A number that ranks compare."""
        adapters = 0 if self.adapters is None else self.adapters.fingerprint(self.data)
        return (adapters * len(MODES) + MODES.index(self.router_replay)) * 2 + self.forward_only


@dataclass
class PassResults:
    """What the micro-batches of one pass gave, whatever the order in which they were computed.

    Attributes:
        request: the pass.
        dp_group: for the loss.
        keeps_outputs: whether this rank is the one of its replica that returns outputs.
    """

    request: PassRequest
    dp_group: dist.ProcessGroup
    keeps_outputs: bool
    _losses: dict[int, Tensor] = field(default_factory=dict)
    _metrics: dict[int, Mapping[str, MetricValue]] = field(default_factory=dict)
    _outputs: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def add(self, index: int, batch: PackedBatch, output: ModelOutput) -> Tensor | None:
        """The loss of micro-batch ``index``, with its graph; None where there is none.

        Raises:
            BatchError: as :func:`check_returned`.
            UnsupportedError: the model gave something else than a number for each token.
        """
        for name, value in output._asdict().items():
            if value is not None and value.shape != batch.input_ids.shape:
                # Losses would spread it over the tokens in silence.
                found, expected = tuple(value.shape), tuple(batch.input_ids.shape)
                raise UnsupportedError(
                    f"the model returned {name} of shape {found} for micro-batch {index}; expected {expected}"
                )
        if self.keeps_outputs:
            self._outputs[index] = {name: value.detach() for name, value in output._asdict().items() if value is not None}
        if self.request.loss_fn is None:
            return None
        loss, metrics = self.request.loss_fn(output, batch, self.dp_group)
        check_returned(f"loss_fn for micro-batch {index}", loss, metrics, forward_only=self.request.forward_only)
        self._metrics[index] = tree_map_only(Tensor, Tensor.detach, dict(metrics))
        if loss is not None:
            self._losses[index] = loss.detach().float()
        return loss

    def result(self, routes: Mapping[str, list[Tensor]]) -> ForwardResult:
        """All of it, in the order of the request, with the ``routes`` that were recorded."""
        data, outputs = self.request.data, dict[str, list[Tensor]]()
        for index in sorted(self._outputs):
            for name, value in self._outputs[index].items():
                outputs.setdefault(name, []).extend(part.clone() for part in data[index].split(value))
        losses = [self._losses[index] for index in sorted(self._losses)]
        return ForwardResult(
            losses=tuple(torch.stack(losses).tolist()) if losses else (),
            metrics=merge_metrics([_as_metrics(self._metrics[index]) for index in sorted(self._metrics)]),
            outputs={**outputs, **routes},
        )


def check_returned(whose: str, loss: object, metrics: object, *, forward_only: bool) -> None:
    """Checks what a loss returned, without a wait for the device.

    Args:
        whose: begins the message.

    Raises:
        BatchError: the loss is not a 0-d tensor with a gradient (or, in a forward-only pass, any 0-d tensor or None), or a
            metric is not a number or a pair of numbers.
    """
    if loss is not None or not forward_only:
        if not isinstance(loss, Tensor):
            raise BatchError(f"{whose} returned a {type(loss).__name__}; expected a 0-d tensor")
        if loss.dim() != 0:
            raise BatchError(f"{whose} returned shape {tuple(loss.shape)}; expected a 0-d tensor")
        if not forward_only and not loss.requires_grad:
            raise BatchError(
                f"{whose} returned a loss without a gradient; compute it from model_output, or pass forward_only=True"
            )
    if not isinstance(metrics, Mapping):
        raise BatchError(f"{whose} returned metrics of type {type(metrics).__name__}; expected a dict, or an empty one")
    for name, value in metrics.items():
        pair = value if isinstance(value, tuple) else (value, 1.0)
        if len(pair) != 2 or not all(map(_is_number, pair)):
            raise BatchError(f"{whose}: metric {name!r} is not a number or a (sum, weight) pair: {value!r}", name=name)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _as_metrics(values: Mapping[str, MetricValue]) -> dict[str, Metric]:
    """Metrics as (sum, weight) on the host."""
    pairs = {name: value if isinstance(value, tuple) else (value, 1.0) for name, value in values.items()}
    return {name: Metric(float(total), float(weight)) for name, (total, weight) in pairs.items()}
