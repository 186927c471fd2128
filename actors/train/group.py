"""Training groups: ranks that are Ray actors around a runtime, with the atoms as calls on the group."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Mapping
from typing import Any, Self

from actors.cluster.placement import PlacementStrategy
from actors.train.operations import TrainOperations
from actors.train.order import Driver
from actors.train.outcome import RankInfo
from actors.train.ranks import GroupMembers, TrainRanks
from actors.train.start import start_ranks
from rl_backend.contracts import RLBackendError, RuntimeConfig
from rl_backend.contracts.atoms import Operation


class TrainGroup(TrainOperations):
    """Training ranks, each on its own cores or GPU.

    Every operation is a call that waits, and has ``.submit(...)``, which takes the same arguments and returns a
    :class:`~actors.train.future.GroupFuture`::

        with TrainGroup(RuntimeConfig(hf_path=...), num_ranks=2) as group:
            policy = group.build_model()
            result = group.forward_backward(policy, sequences, Loss("my_project.losses:clipped"))
            future = group.optimizer_step.submit(policy)

    One driver operates a group. A pickled copy, in a task or another driver, is refused until it calls :meth:`take_over`.
    An error that every rank answered to is raised as what it is, with the rank and the remote traceback, and the group
    stays usable (drop half-made gradients with ``zero_grad``). A rank that dies, or fails while its peers are in a
    collective, ends the group with :class:`~rl_backend.contracts.GroupFailedError`.

    With ``gpus_per_rank=1`` each rank sees one CUDA device, is ``LOCAL_RANK`` 0 on it, and the runtime uses NCCL. That path
    has not been run.

    Args:
        config: every rank builds its runtime from it. Paths in it must exist on every node.
        num_ranks: the world size.
        cores_per_rank: CPU cores reserved for a rank, and its number of threads.
        gpus_per_rank: 0, 1, or less than 1 for a single rank that shares its GPU, for example with an engine of
            ``RolloutConfig(gpus_per_worker=0.5)``.
        placement: ``pack`` ranks on few nodes, or ``spread`` them.
        name: for messages and Ray's tools; empty makes one.
        failure_grace: seconds that the peers of a failed rank have to answer before all are stopped.
        placement_timeout: seconds to wait for the cluster's resources.
        start_timeout: seconds for the ranks to start and find each other.

    Raises:
        ConfigError: numbers, or a device in ``config``, that do not go together, or Ray is not initialised.
        UnsupportedError: the cluster does not have the cores or GPUs.
        GroupFailedError: a rank could not start.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        num_ranks: int = 1,
        cores_per_rank: int = 1,
        gpus_per_rank: float = 0,
        *,
        placement: PlacementStrategy = "pack",
        name: str = "",
        failure_grace: float = 5.0,
        placement_timeout: float = 10.0,
        start_timeout: float = 300.0,
    ) -> None:
        group_id = uuid.uuid4().hex
        ranks = start_ranks(
            config,
            group_id=group_id,
            name=name or f"train-{group_id[:8]}",
            num_ranks=num_ranks,
            cores_per_rank=cores_per_rank,
            gpus_per_rank=gpus_per_rank,
            placement=placement,
            failure_grace=failure_grace,
            placement_timeout=placement_timeout,
            start_timeout=start_timeout,
        )
        self._attach(config, ranks)
        self._finalizer: weakref.finalize[[], TrainGroup] | None = weakref.finalize(self, ranks.members.kill)

    @property
    def name(self) -> str:
        return self._ranks.members.name

    @property
    def num_ranks(self) -> int:
        return len(self._ranks.members.workers)

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Node, address and process of each rank."""
        return self._ranks.infos

    @property
    def journal(self) -> tuple[Operation, ...]:
        """The operations that built the group's models and LoRA tenants, in order, without those that were removed.

        With the configuration they build a lost group again::

            handles = group.replay(lost.journal)
            policy = handles[policy.key]

        Weights are not in it: load a checkpoint.
        """
        return tuple(self._ranks.journal)

    @property
    def ended(self) -> bool:
        """Whether the group has failed or was shut down, to this driver's knowledge."""
        return self._ranks.ended

    @property
    def peak_memory(self) -> int:
        """Bytes: the most that any rank has held so far, on its GPU or, without one, in host memory. 0 before a result."""
        return self._ranks.peak_memory

    def trace_actors(self) -> Mapping[str, Any]:
        """For a :class:`~actors.run.trace.TraceCollector`; empty once the group has ended."""
        workers = () if self.ended else self._ranks.members.workers
        return {f"rank {rank}": worker for rank, worker in enumerate(workers)}

    def take_over(self, timeout: float = 60.0) -> None:
        """Makes this copy the one that operates the group; every other copy is refused from now on.

        Waits until the operations of the driver before are finished on every rank.

        Raises:
            OperationOrderError: they were not within ``timeout`` seconds, or one was lost with its driver.
        """
        self._ranks.take_over(timeout)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Closes the runtimes and frees actors, cores and GPUs; a second call does nothing.

        Waits up to ``timeout`` seconds for operations in flight, then stops the ranks all the same. Errors of closing are
        raised after everything is freed.

        Raises:
            OperationOrderError: another driver operates the group.
        """
        if self.ended:
            return
        # Refused before anything ends where another driver operates the group, which this one may learn only here.
        closing = self.submit("shutdown")
        try:
            closing.result(timeout)
        except TimeoutError:
            return
        finally:
            self._ranks.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.shutdown()
        except RLBackendError as closing:
            if error is None:
                raise
            error.add_note(f"TrainGroup.shutdown() failed as well: {closing}")

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy may outlive this object, so the group then ends with `shutdown` or its Ray job alone.
        if self._finalizer is not None:
            self._finalizer.detach()
        return (_copy, (self.config, self._ranks.members, self._ranks.infos, self._ranks.operator, self.journal))


def _copy(
    config: RuntimeConfig,
    members: GroupMembers,
    infos: tuple[RankInfo, ...],
    operator: str,
    journal: tuple[Operation, ...],
) -> TrainGroup:
    ranks = TrainRanks(members, Driver.here(), owned=False)
    ranks.infos = infos
    ranks.operator = operator
    ranks.journal = list(journal)
    group = TrainGroup.__new__(TrainGroup)
    group._attach(config, ranks)
    group._finalizer = None
    return group
