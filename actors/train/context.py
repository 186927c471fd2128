"""Names of models in any process, and the rank that code runs in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_backend.contracts import HandleError, Head, ModelHandle
from rl_backend.runtime import Runtime


@dataclass(frozen=True)
class HandleRef:
    """Names one model of a training group, in any process.

    Attributes:
        group_id: of the group that built it.
        key: the operation that built it.
        data_parallel_ranks: rank -> its data-parallel rank.
        source_ranks: data-parallel rank -> the rank that has its outputs.
        head: ``log_probs``, or ``values`` of a critic.
        micro_batch_multiple: ``forward_backward`` gets a multiple of so many micro-batches on each rank.
        lora_id: of a LoRA tenant, for the sequence field of :data:`~rl_backend.contracts.lora.LORA_FIELD`; -1 for a model.
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

    @property
    def data_parallel_size(self) -> int:
        return len(self.source_ranks)


@dataclass
class RankContext:
    """One rank of a training group.

    Attributes:
        runtime: the rank's runtime.
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
        """As :meth:`handle`, of one model or of each of several."""
        return self.handle(refs) if isinstance(refs, HandleRef) else [self.handle(ref) for ref in refs]

    def keep(self, handle: ModelHandle) -> int:
        """Stores a handle that the running operation made and returns its key, the same on every rank."""
        self._handles[self.operation] = handle
        return self.operation

    def forget(self, ref: HandleRef) -> None:
        """Drops the handle that ``ref`` names."""
        del self._handles[ref.key]
