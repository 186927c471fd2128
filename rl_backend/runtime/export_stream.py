"""Streams of exported weights: names, buckets, and ranks that continue or end together."""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import ConfigError, ExportInterruptedError

type WeightStream = Generator[tuple[str, Tensor], None, None]


class Gathered(Protocol):
    """What a runtime gathers at one time. Its text names it in messages."""

    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> object: ...


def require_known_names(operation: str, wanted: Collection[str] | None, known: Collection[str]) -> None:
    """Raises :class:`ConfigError` for names that the model does not have; None asks for all."""
    unknown = sorted(set(wanted or ()).difference(known))
    if unknown:
        raise ConfigError(
            f"{operation}: the model has no weights called {', '.join(unknown[:8])}; weight_infos lists its names",
            names=unknown,
        )


def plan_buckets[G: Gathered](items: Sequence[G], byte_budget: int | None) -> list[list[G]]:
    """``items`` in order, in buckets of one dtype and at most ``byte_budget`` bytes; None gives each its own bucket.

    Raises:
        ConfigError: a budget smaller than the largest item.
    """
    if byte_budget is None:
        return [[item] for item in items]
    largest = max(items, key=lambda item: item.nbytes, default=None)
    if largest is not None and largest.nbytes > byte_budget:
        raise ConfigError(
            f"export_weights: byte_budget={byte_budget} cannot hold {largest} with {largest.nbytes} bytes; raise the budget",
            byte_budget=byte_budget,
            name=str(largest),
            nbytes=largest.nbytes,
        )
    buckets: list[list[G]] = []
    filled = 0
    for item in items:
        if not buckets or buckets[-1][-1].dtype != item.dtype or filled + item.nbytes > byte_budget:
            buckets.append([])
            filled = 0
        buckets[-1].append(item)
        filled += item.nbytes
    return buckets


def start_stream[G](
    buckets: Sequence[Sequence[G]],
    gather: Callable[[Sequence[G]], Iterator[tuple[str, Tensor]]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> WeightStream:
    """The generator over what ``gather`` makes of every bucket, a collective over ``group``.

    The ranks agree before each bucket and at the end. Where one has closed its generator, the others raise
    :class:`ExportInterruptedError`.
    """

    def raise_if_interrupted() -> None:
        if not _all_go_on(group, device, True):
            raise ExportInterruptedError("another rank closed export_weights before its end, so it ended on this rank too")

    def stream() -> WeightStream:
        left: Iterator[tuple[str, Tensor]] = iter(())
        try:
            yield "", torch.empty(0)
            for bucket in buckets:
                raise_if_interrupted()
                left = gather(bucket)
                # Not `yield from`, which would close what is left together with this generator.
                for item in left:  # noqa: UP028
                    yield item
        except GeneratorExit:
            for _ in left:
                # The other ranks gather the rest of this bucket before they ask.
                pass
            _all_go_on(group, device, False)
            raise
        raise_if_interrupted()

    started = stream()
    # Closing a generator that has not begun would run nothing, and leave the other ranks waiting.
    next(started)
    return started


def _all_go_on(group: dist.ProcessGroup, device: torch.device, here: bool) -> bool:
    if group.size() == 1:
        return here
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())
