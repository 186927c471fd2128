"""Names of models in any process, and the rank that code runs in with its models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from rl_backend.contracts import HandleError, Head, ModelHandle, RLBackendError
from rl_backend.runtime import Runtime


@dataclass(frozen=True)
class HandleRef:
    """Names one model of a training group, in any process.

    Attributes:
        data_parallel_ranks: rank -> its data-parallel rank.
        source_ranks: data-parallel rank -> the rank that has its outputs.
        head: ``log_probs``, or ``values`` of a critic.
        micro_batch_multiple: ``forward_backward`` gets a multiple of so many micro-batches on each rank.
        lora_id: of a LoRA tenant, for the sequence field of :data:`~rl_backend.contracts.lora.LORA_FIELD`; -1 for a model.
        shares_prefixes: sequences that begin with the same tokens are kept together; these are computed once.
    """

    group_id: str
    key: int
    name: str
    forward_only: bool
    data_parallel_ranks: tuple[int, ...]
    source_ranks: tuple[int, ...]
    head: Head = "log_probs"
    micro_batch_multiple: int = 1
    lora_id: int = -1
    shares_prefixes: bool = False

    @classmethod
    def of(cls, built: Sequence[BuiltModel]) -> HandleRef:
        size = built[0].data_parallel_size
        sources = {each.data_parallel_rank: rank for rank, each in enumerate(built) if each.is_source}
        # Two sources of one rank's outputs, or none, would merge results of wrong sequences.
        if sorted(sources) != list(range(size)) or sum(each.is_source for each in built) != size:
            raise RLBackendError(
                f"the runtime names ranks {sorted(sources.values())} as sources of the outputs of data-parallel ranks "
                f"{sorted(sources)}; expected one for each of {size}"
            )
        return replace(
            built[0].ref,
            data_parallel_ranks=tuple(each.data_parallel_rank for each in built),
            source_ranks=tuple(sources[dp_rank] for dp_rank in range(size)),
        )

    @property
    def data_parallel_size(self) -> int:
        return len(self.source_ranks)


class BuiltModel(NamedTuple):
    """What a rank says of a model: its ``ref``, in which the ranks are still missing, and what this rank is to it."""

    ref: HandleRef
    data_parallel_rank: int
    data_parallel_size: int
    is_source: bool


def refs_in(arguments: Iterable[Any]) -> Iterator[HandleRef]:
    for each in arguments:
        yield from (ref for ref in (each if isinstance(each, list | tuple) else [each]) if isinstance(ref, HandleRef))


@dataclass
class RankContext:
    """One rank of a training group.

    Attributes:
        operation: number of the operation that runs; the same on every rank.
        state: for whatever a caller of ``run_on_ranks`` keeps in the rank from one operation to the next; what has a
            ``close()`` is closed when the group is shut down.
    """

    runtime: Runtime[Any]
    group_id: str
    rank: int
    world_size: int
    operation: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    _handles: dict[int, ModelHandle] = field(default_factory=dict)

    def handle(self, ref: HandleRef) -> ModelHandle:
        """This rank's handle; raises :class:`~rl_backend.contracts.HandleError` for one of another group."""
        if ref.group_id != self.group_id or ref.key not in self._handles:
            raise HandleError(f"model {ref.name!r} was not built by this training group", name=ref.name)
        return self._handles[ref.key]

    def handles(self, refs: HandleRef | Sequence[HandleRef]) -> Any:
        return self.handle(refs) if isinstance(refs, HandleRef) else [self.handle(ref) for ref in refs]

    def keep(self, handle: ModelHandle) -> BuiltModel:
        # The operation's number is a key that is the same on every rank.
        self._handles[self.operation] = handle
        ref = HandleRef(
            self.group_id,
            self.operation,
            handle.name,
            handle.forward_only,
            data_parallel_ranks=(),
            source_ranks=(),
            head=handle.head,
            micro_batch_multiple=handle.micro_batch_multiple,
            lora_id=handle.lora_id,
            shares_prefixes=handle.shares_prefixes,
        )
        is_source = self.runtime.is_mp_src_rank_with_outputs(handle)
        return BuiltModel(ref, handle.data_parallel_rank, handle.data_parallel_size, is_source)

    def forget(self, ref: HandleRef) -> None:
        del self._handles[ref.key]

    def close(self) -> None:
        with ExitStack() as stack:
            # First in, last out: what callers keep may still use the runtime's process groups.
            stack.callback(self.runtime.close)
            for kept in self.state.values():
                if callable(getattr(kept, "close", None)):
                    stack.callback(kept.close)


@dataclass(frozen=True)
class RankFunction:
    """A call of ``function(context, *args, **kwargs)`` on a rank, beside the calls of atoms."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def weight_version(context: RankContext, handle: HandleRef) -> int:
    return context.handle(handle).weight_version


def lora_factors(context: RankContext, handle: HandleRef) -> dict[str, Tensor]:
    # On every rank, because the export is a collective.
    found = {name: tensor.cpu() for name, tensor in context.runtime.export_lora_adapter(context.handle(handle))}
    return found if context.rank == 0 else {}
