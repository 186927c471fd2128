"""Sources of pushed weights: a training group, or plain tensors of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, Protocol, Self

import torch
from torch import Tensor

from actors.train.group import PinnedRanks, TrainGroup
from rl_backend.contracts import ConfigError, TensorInfo


class SourceContext(Protocol):
    rank: int
    world_size: int
    state: dict[str, Any]

    @property
    def runtime(self) -> Any: ...

    def handle(self, ref: Any) -> Any: ...


class SourceRanks(Protocol):
    """What a push needs of a training group: to run a function on every rank, as one operation."""

    def run_on_ranks[**P, R](
        self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...


def pinned(train: SourceRanks) -> SourceRanks:
    """Of a group the ranks that it has now: what a push leaves in their memory is not in that of others."""
    return train.pinned() if isinstance(train, TrainGroup) else train


def layout_of(ranks: SourceRanks) -> int:
    """How often the layout had changed when these were the ranks."""
    return ranks.layout if isinstance(ranks, PinnedRanks) else 0


class WeightSource:
    """Plain tensors as the trainer's side of a push, for those who train without a ``TrainGroup``.

    Args:
        weights: Hugging Face name -> full tensor, or a function that yields such pairs, called once for each push.
        version: weight version of the next push; advance it after every optimizer step.
    """

    def __init__(self, weights: Mapping[str, Tensor] | Callable[[], Iterator[tuple[str, Tensor]]], version: int = 0) -> None:
        self._weights = weights
        self.version = version
        self._context = _OnlyRank(self)

    def run_on_ranks[**P, R](self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return [function(self._context, *args, **kwargs)]

    def tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        pairs = self._weights() if callable(self._weights) else self._weights.items()
        for name, tensor in pairs:
            full = tensor.detach()
            yield name, full.to(dtype) if dtype is not None and full.is_floating_point() else full


class _OnlyRank:
    """The only rank of a :class:`WeightSource`: its context, its runtime and the handle of its model in one."""

    rank = 0
    world_size = 1
    kept: Mapping[str, tuple[int, ...]] = {}

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.state: dict[str, Any] = {}

    @property
    def runtime(self) -> Any:
        return self

    def handle(self, ref: None) -> Self:
        if ref is not None:
            raise ConfigError.of("handle", ref, "a WeightSource is one model; leave the handle out")
        return self

    @property
    def weight_version(self) -> int:
        return self._source.version

    def weight_infos(self, handle: Self, *, dtype: torch.dtype | None = None) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo.of(name, tensor.shape, tensor.dtype) for name, tensor in self._source.tensors(dtype))

    def export_weights(
        self, handle: Self, *, dtype: torch.dtype | None = None, byte_budget: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        yield from self._source.tensors(dtype)
