"""Training groups: ranks that are Ray actors around a runtime, with the atoms as operations of the group."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Self, overload

from ray import cloudpickle
from torch import Tensor

from actors.cluster.placement import AskedRoom, PlacementStrategy, check_asked
from actors.train.context import HandleRef, RankContext, RankFunction, lora_factors, refs_in, weight_version
from actors.train.kept import CHANGES, READS, Call, Facts, facts_of, models_in
from actors.train.layout import Layout, check_fewest
from actors.train.loss import LossSender
from actors.train.order import Driver
from actors.train.outcome import RankInfo
from actors.train.passes import Pass, PassOptions, token_budget
from actors.train.pulse import BOUNDS, Recover, WaitBounds, end_processes
from actors.train.ranks import GroupMembers, TrainRanks, start_ranks
from actors.train.recovery import Recovered, Recovery, Reshaped
from rl_backend.contracts import (
    AdamParams,
    ConfigError,
    ForwardResult,
    GroupFailedError,
    HandleError,
    Losses,
    ParallelConfig,
    RLBackendError,
    RuntimeConfig,
    TokenSequence,
)
from rl_backend.contracts.atoms import Operation
from rl_backend.data import sequences_from_tensordict
from rl_backend.runtime import RouterReplay, Runtime, check_config

if TYPE_CHECKING:
    from tensordict import TensorDictBase


logger = logging.getLogger(__name__)


class GroupFuture[R]:
    def __init__(self, name: str, wait: Callable[[float | None], R], ready: Callable[[], bool]) -> None:
        self.name = name
        self._wait = wait
        self._ready = ready
        self._lock = threading.Lock()
        self._result: tuple[R] | None = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> R:
        """Waits for every rank. While nobody waits, nobody notices a failure: read the results of what was submitted.

        Args:
            timeout: seconds; the operation continues when they have passed, and ``result`` may be called again.

        Raises:
            TimeoutError: not done in time.
            GroupFailedError: a rank died, or left its peers in a collective; the group is gone.
            Exception: what the ranks raised, when all of them answered; the group continues.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._result is None:
                try:
                    self._result = (self._wait(timeout),)
                # It continues, and may be asked for again; any other error stays the result.
                except TimeoutError:
                    raise
                except Exception as error:
                    self._error = error
                    raise
            return self._result[0]

    def done(self) -> bool:
        return self._result is not None or self._error is not None or self._ready()


class BoundOperation[**P, R]:
    """One operation of one group; ``submit`` starts it, after those submitted before."""

    def __init__(self, submit: Callable[P, GroupFuture[R]]) -> None:
        self.submit = submit
        functools.update_wrapper(self, submit)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.submit(*args, **kwargs).result()


class operation[G, **P, R]:  # noqa: N801, a decorator
    """Makes a method of a group that returns a future into an operation."""

    def __init__(self, method: Callable[Concatenate[G, P], GroupFuture[R]]) -> None:
        self._method = method
        functools.update_wrapper(self, method)  # type: ignore[arg-type]

    @overload
    def __get__(self, group: None, owner: type) -> operation[G, P, R]: ...
    @overload
    def __get__(self, group: G, owner: type) -> BoundOperation[P, R]: ...
    def __get__(self, group: G | None, owner: type) -> Any:
        if group is None:
            return self
        return BoundOperation(functools.wraps(self._method)(functools.partial(self._method, group)))


Atoms = Runtime[HandleRef]
"""Signatures of the atoms where references name models."""


def remote[**P, R](method: Callable[Concatenate[Runtime[HandleRef], P], R]) -> operation[TrainGroup, P, R]:
    """The operation that runs an atom on every rank, with the atom's own signature."""

    @functools.wraps(method)
    def start(group: TrainGroup, /, *args: P.args, **arguments: P.kwargs) -> GroupFuture[R]:
        return group.submit(method, *args, **arguments)

    return operation(start)


class TrainGroup:
    """Training ranks, each on its own cores or GPU.

    Every operation is a call that waits, and has ``.submit(...)``, which takes the same arguments and returns a
    :class:`GroupFuture`::

        with TrainGroup(RuntimeConfig(hf_path=...), num_ranks=2) as group:
            policy = group.build_model()
            result = group.forward_backward(policy, sequences, Loss("my_project.losses:clipped"))
            future = group.optimizer_step.submit(policy)

    One driver operates a group. A pickled copy, in a task or another driver, is refused until it calls :meth:`take_over`.
    An error that every rank answered to is raised as what it is, with the rank and the remote traceback, and the group
    stays usable (drop half-made gradients with ``zero_grad``). A rank that dies, or fails while its peers are in a
    collective, ends the group with :class:`~rl_backend.contracts.GroupFailedError`.

    With ``gpus_per_rank`` each rank sees one CUDA device, is ``LOCAL_RANK`` 0 on it, and the runtime uses NCCL. That path
    has not been run.

    Args:
        config: every rank builds its runtime from it. Paths in it must exist on every node.
        cores_per_rank: CPU cores reserved for a rank, and its number of threads.
        gpus_per_rank: 0, 1, or a share of a GPU for ranks that engines are beside: several ranks with 0.6, say, and as many
            engines of ``RolloutConfig(gpus_per_worker=0.4)``. Several ranks take more than 0.5.
        failure_grace: seconds that the peers of a failed rank have to answer before all are stopped. Those that are seen to
            wait in a collective are stopped after one.
        bounds: how long a rank that hangs is waited for; it counts as dead then.
        recover: with ``checkpoint`` a rank that dies, or fails while its peers are in a collective, does not end the group.
            Other ranks take the place of all, build the models, load what :meth:`bound` was told of last, and run the
            operations since then again with the same data, which this process keeps until the next; references and futures
            stay valid. An operation in which ranks die twice ends the group. With ``memory`` they load what each model was
            after its last optimizer step, which a process on another node, or beside the ranks, keeps in memory; that needs
            no checkpoint.
        min_ranks: of a group that recovers: where the cluster has no room for all ranks any more, fewer data-parallel ones
            take their place, at least so many, until :meth:`grow`. 0 waits for all of them, and ends the group without.

    Raises:
        ConfigError: numbers, or a device in ``config``, that do not go together, or Ray is not initialised.
        UnsupportedError: the cluster does not have the cores or GPUs.
        GroupFailedError: a rank could not start.
    """

    _gpus_per_rank: float = 0

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
        bounds: WaitBounds = BOUNDS,
        recover: Recover = "off",
        min_ranks: int = 0,
    ) -> None:
        if min_ranks and recover == "off":
            raise ConfigError.of("TrainGroup.min_ranks", min_ranks, "recover=off ends the group at the first death; use 0")
        check_fewest("TrainGroup", config.backend_cfg.parallel, num_ranks, min_ranks)
        group_id = uuid.uuid4().hex
        name = name or f"train-{group_id[:8]}"
        start = partial(
            start_ranks,
            group_id=group_id,
            name=name,
            cores_per_rank=cores_per_rank,
            gpus_per_rank=gpus_per_rank,
            placement=placement,
            failure_grace=failure_grace,
            placement_timeout=placement_timeout,
            start_timeout=start_timeout,
        )
        ranks = start(config, num_ranks=num_ranks)
        ranks.bounds = bounds
        room = partial(
            AskedRoom, cores_per_rank=cores_per_rank, gpus_per_rank=gpus_per_rank, strategy=placement, name=f"{name}-more"
        )
        recovery = Recovery(
            ranks,
            None if recover == "off" else start,
            Layout(config, num_ranks),
            in_memory=recover == "memory",
            min_ranks=min_ranks,
            ask_room=room,
        )
        self._gpus_per_rank = gpus_per_rank
        self._over(config, recovery, weakref.finalize(self, recovery.kill))

    def _over(
        self, config: RuntimeConfig, recovery: Recovery, finalizer: weakref.finalize[[], TrainGroup] | None = None
    ) -> Self:
        self.config = config
        self._recovery = recovery
        self._losses = LossSender()
        # A group that nobody refers to any more must give its cores and GPUs back.
        self._finalizer = finalizer
        return self

    # How a group lives and ends.

    @property
    def _ranks(self) -> TrainRanks:
        return self._recovery.ranks

    @property
    def name(self) -> str:
        return self._ranks.members.name

    @property
    def num_ranks(self) -> int:
        return len(self._ranks.members.workers)

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        return self._ranks.infos

    @property
    def journal(self) -> tuple[Operation, ...]:
        """The operations that built the group's models and LoRA tenants, in order, without those that were removed.

        ``handles = group.replay(lost.journal)`` builds a lost group again, and ``handles[policy.key]`` is its policy.
        Weights are not in it: load a checkpoint.
        """
        return tuple(self._ranks.journal)

    @property
    def ended(self) -> bool:
        return self._ranks.ended

    @property
    def peak_memory(self) -> int:
        """Bytes that any rank has held at most so far, on its GPU or, without one, in host memory. 0 before a result."""
        return self._ranks.peak_memory

    def trace_actors(self) -> Mapping[str, Any]:
        workers = () if self.ended else self._ranks.members.workers
        return {f"rank {rank}": worker for rank, worker in enumerate(workers)}

    def take_over(self, timeout: float = 60.0) -> None:
        """Makes this copy operate the group, once the operations of the driver before are finished on every rank.

        Raises:
            OperationOrderError: they were not within ``timeout`` seconds, or one was lost with its driver.
        """
        self._ranks.take_over(timeout)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Closes the runtimes and frees actors, cores and GPUs; a second call does nothing.

        Waits up to ``timeout`` seconds for operations in flight, then stops the ranks all the same. Errors of closing are
        raised after everything is freed.
        """
        if self.ended:
            return
        self._recovery.stop("the group is shut down")
        # Refused before anything ends where another driver operates the group, which this one may learn only here.
        try:
            closing = self._on_ranks("shutdown", RankFunction(RankContext.close), list)
            try:
                closing.result(timeout)
            except TimeoutError:
                return
            finally:
                self._ranks.end()
        except GroupFailedError as error:
            # All that was asked of the ranks is done: what a run has saved is there.
            if not self._recovery.recovers:
                raise
            # Ray does not reach one that is stopped.
            end_processes(self._ranks.infos)
            logger.warning("a rank was lost while its group closed: %s", error)

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

    # Recovery: with recover="checkpoint" or "memory" a death does not end the group.

    @property
    def epoch(self) -> int:
        """How often all ranks were replaced."""
        return self._recovery.epoch

    @property
    def wants_boundary(self) -> bool:
        """Whether operations since the last checkpoint take so much of the driver's memory that another one is due."""
        return self._recovery.wants_boundary

    def bound(self, handle: HandleRef, saved: Path, committed: Path) -> None:
        """A model's checkpoint, which ``save_checkpoint`` wrote to ``saved``, is complete at ``committed`` and stays there
        until the next: from now on a recovery loads it, and runs only again what came later.
        """
        self._recovery.bound(handle, saved, committed)

    def steady(self) -> AbstractContextManager[object]:
        """Inside, no thread replaces ranks: what was saved may move, and :meth:`bound` says where to."""
        return self._recovery.steady

    def say_recoveries(self, say: Callable[[str], None]) -> None:
        """Calls ``say`` with a line for each recovery from now on, in place of a warning of the logger."""
        # Of one that never recovers nothing is kept, which might refer to the group.
        if self._recovery.recovers:
            self._recovery.on_recovered = say

    @property
    def recoveries(self) -> tuple[Recovered, ...]:
        return tuple(self._recovery.events)

    def pinned(self) -> PinnedRanks:
        """The ranks that the group has now, for calls that build on what earlier ones left in a rank's memory."""
        return PinnedRanks(self, self.epoch, self._recovery.num_layouts)

    # Another layout, between two steps.

    def reshape(self, num_ranks: int, config: RuntimeConfig | None = None, **sizes: int) -> Reshaped:
        """Moves all models to ``num_ranks`` ranks in another layout, from memory, without a checkpoint.

        Handles, futures, syncs and savers stay what they are. New ranks take the place of the old ones, for which the
        cluster needs no more room than the larger of the two layouts.

        Args:
            config: of another runtime, or with other options; None takes the group's.
            sizes: of :class:`~rl_backend.contracts.ParallelConfig`, as in ``tp=2``; one that is not given is 1, and the
                ranks that are left over are data-parallel. Without any, those of a ``config``.

        Raises:
            ConfigError: a group with ``recover="off"``, or a layout that does not fit; nothing has changed.
            HandleError: a model has gradients, or is being saved; nothing has changed.
            RLBackendError: the ranks did not start, or cannot build the models; the group has the layout of before.
            GroupFailedError: nor did the ranks of before start again.
        """
        if not self._recovery.recovers:
            raise ConfigError.of("TrainGroup.recover", "off", "a group gets another layout as it recovers; use memory")
        check_asked(num_ranks, 1, self._gpus_per_rank)
        if sizes or config is None:
            config = config or self.config
            config = config.replace(backend_cfg=config.backend_cfg.replace(parallel=ParallelConfig(**sizes)))
        check_config(config, num_ranks)
        reshaped = self._recovery.reshape(Layout(config, num_ranks))
        self.config = config
        return reshaped

    @property
    def wanted_ranks(self) -> int:
        """How many ranks the group has, or had before it got smaller."""
        return self._recovery.wanted_ranks

    @property
    def has_room(self) -> bool:
        """Whether the cluster has room again for the ranks that a group with ``min_ranks`` has lost; see :meth:`grow`."""
        return self._recovery.has_room

    def grow(self) -> Reshaped | None:
        """Gives the group all of its ranks back, as :meth:`reshape` does; None where it stays as it is, as that was said or
        because a model is not between two steps.
        """
        return self._recovery.grow()

    @property
    def reshapes(self) -> tuple[Reshaped, ...]:
        """Every time that the group got another layout, also of fewer ranks in a recovery."""
        return tuple(self._recovery.reshapes)

    # Operations on models.

    build_model = remote(Atoms.build_model)
    """``hf_path`` must exist on every node."""

    @operation
    def forward_backward(
        self,
        handle: HandleRef,
        sequences: Sequence[TokenSequence] | TensorDictBase,
        loss: Losses | None,
        *,
        forward_only: bool = False,
        meta: Mapping[str, Any] | None = None,
        max_tokens_per_micro_batch: int | None = None,
        router_replay: RouterReplay = "off",
    ) -> GroupFuture[ForwardResult]:
        """Spreads sequences over the data-parallel ranks, runs them forward and backward, and merges the results.

        The model is in training mode, or in evaluation mode when ``forward_only``, for the length of the call. Where the
        number of sequences cannot give every rank as many micro-batches, copies with a ``loss_mask`` of zeros and without
        ``target_ids`` join them; a batch with a loss and neither of these token fields is refused then.

        Args:
            sequences: a list, or a TensorDict with jagged fields (``sequences_from_tensordict``), on the CPU.
            loss: a :class:`~actors.train.loss.Loss`, or any callable that can be pickled. None if a forward-only pass wants
                only outputs. For sequences of several LoRA tenants one of each, by the tenant's name.
            meta: as ``PackedBatch.meta``; see :func:`~rl_backend.data.micro_batches.pack_plan` for what is added.
            max_tokens_per_micro_batch: at most the configuration's, which None takes.
            router_replay: as in :meth:`~rl_backend.runtime.Runtime.forward_backward`; what is recorded is the output
                ``routed_experts``.

        Returns:
            losses: per micro-batch, averaged over data-parallel ranks; their sum is what is minimised. metrics: over all
            ranks. outputs: in the order of ``sequences``, on the CPU.

        Raises:
            BatchError: data that does not fit its contract; refused before any rank has seen it.
            HandleError: a backward pass of a forward-only model, or a model of another group.
        """
        self._require_mine([handle])
        # Spread here, not on the ranks: wrong data is refused before an operation gets its number.
        rows = sequences if isinstance(sequences, Sequence) else sequences_from_tensordict(sequences)
        budget = token_budget(max_tokens_per_micro_batch, self.config.max_tokens_per_micro_batch)
        options = PassOptions(budget, loss is not None, forward_only, router_replay, dict(meta or {}))
        models = frozenset[int]() if forward_only else models_in([handle]) or self._tenants_with(loss, handle)
        facts: Facts = ("reads" if forward_only else "changes", models, None)
        return self._start("forward_backward", Pass.over(self._laid_out(handle), rows, options), Pass.merged, loss, facts)

    @operation
    def forward(
        self,
        handle: HandleRef,
        sequences: Sequence[TokenSequence] | TensorDictBase,
        *,
        meta: Mapping[str, Any] | None = None,
        max_tokens_per_micro_batch: int | None = None,
        router_replay: RouterReplay = "off",
    ) -> GroupFuture[ForwardResult]:
        return self.forward_backward.submit(
            handle,
            sequences,
            None,
            forward_only=True,
            meta=meta,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            router_replay=router_replay,
        )

    zero_grad = remote(Atoms.zero_grad)

    @operation
    def optimizer_step(
        self,
        handle: HandleRef | Sequence[HandleRef],
        *,
        adam: AdamParams | Sequence[AdamParams | None] | None = None,
        zero_grad: bool = False,
    ) -> GroupFuture[Any]:
        """As :meth:`~rl_backend.runtime.Runtime.optimizer_step`; of several LoRA tenants a list of results."""
        return self.submit(Atoms.optimizer_step, handle, adam=adam, zero_grad=zero_grad)

    @operation
    def lr_scheduler_step(self, handle: HandleRef | Sequence[HandleRef]) -> GroupFuture[Any]:
        return self.submit(Atoms.lr_scheduler_step, handle)

    to = remote(Atoms.to)
    save_checkpoint = remote(Atoms.save_checkpoint)
    """On a file system that every rank sees."""
    wait_for_checkpoint = remote(Atoms.wait_for_checkpoint)
    checkpoint_is_pending = remote(Atoms.checkpoint_is_pending)
    load_checkpoint = remote(Atoms.load_checkpoint)

    @operation
    def weight_version(self, handle: HandleRef) -> GroupFuture[int]:
        self._require_mine([handle])
        call = RankFunction(weight_version, (handle,))
        return self._on_ranks("weight_version", call, partial(_agreed, handle), READS)

    # LoRA tenants: every other operation takes their handles too.

    create_lora_adapter = remote(Atoms.create_lora_adapter)
    remove_lora_adapter = remote(Atoms.remove_lora_adapter)
    reset_optimizer = remote(Atoms.reset_optimizer)
    get_lora_adapter = remote(Atoms.get_lora_adapter)
    list_lora_adapters = remote(Atoms.list_lora_adapters)
    get_optimizer_state = remote(Atoms.get_optimizer_state)
    list_optimizer_states = remote(Atoms.list_optimizer_states)
    """``bytes`` are those of rank 0."""
    get_backend_info = remote(Atoms.get_backend_info)

    @operation
    def export_lora_adapter(self, handle: HandleRef) -> GroupFuture[dict[str, Tensor]]:
        self._require_mine([handle])
        return self._on_ranks("export_lora_adapter", RankFunction(lora_factors, (handle,)), itemgetter(0), READS)

    @operation
    def import_lora_adapter(
        self, handle: HandleRef, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Path | str
    ) -> GroupFuture[None]:
        """As :meth:`~rl_backend.runtime.Runtime.import_lora_adapter`, also of a directory that every rank can read."""
        given = str(Path(tensors).absolute()) if isinstance(tensors, Path | str) else dict(tensors)
        return self.submit(Atoms.import_lora_adapter, handle, given)

    # Any function, and any atom.

    def run_on_ranks[**P, R](
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Calls ``function(context, *args, **kwargs)`` in every rank's process as one operation; one result per rank.

        The function must call the runtime of ``context``, a :class:`~actors.train.context.RankContext`, on every rank alike,
        because the runtime's calls are collectives. Of a large result that this process only hands on, return an
        :class:`~actors.train.outcome.Apart`. A group that recovers runs the function again on the ranks that take the place
        of others: what it reads must be there as long.
        """
        return self.submit_on_ranks(function, *args, **kwargs).result()

    def submit_on_ranks[**P, R](
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> GroupFuture[list[R]]:
        return self._on_ranks(_title(function), RankFunction(function, args, kwargs), list)

    def run_pinned(self, epoch: int, call: RankFunction) -> list[Any]:
        pinned: Facts = ("pinned", frozenset(), None)
        return self._on_ranks(_title(call.function), call, list, pinned, epoch).result()

    def submit[R](self, method: Callable[..., R], /, *args: Any, **arguments: Any) -> GroupFuture[R]:
        """Starts the atom that a method of :class:`~rl_backend.runtime.Runtime` declares, also one of your own runtime."""
        signature = inspect.signature(method)
        given = dict(list(signature.bind(None, *args, **arguments).arguments.items())[1:])
        # What has its default is left to the ranks: a plugin's runtime need not take it.
        chosen = {name: value for name, value in given.items() if value is not signature.parameters[name].default}
        return self._submit(Operation(method.__name__, chosen))

    def replay(self, journal: Sequence[Operation]) -> dict[int, HandleRef]:
        """Builds what another group's journal has again, without weights and optimizers; ``key`` of each handle there ->
        handle.
        """
        built: dict[int, HandleRef] = {}
        for each in journal:
            given = {
                name: built[value.key] if isinstance(value, HandleRef) else value for name, value in each.arguments.items()
            }
            built[each.number] = self._submit(Operation(each.name, given)).result()
        return built

    def _submit(self, operation: Operation) -> GroupFuture[Any]:
        atom, arguments = operation.atom, operation.arguments
        assert atom.join is not None, f"what {atom.name} gives cannot leave a rank; call it in run_on_ranks"
        self._require_mine(arguments.values())

        def finish(values: list[Any]) -> Any:
            if atom.builds:
                made = HandleRef.of(values)
                # By its name: one that the runtime chose depends on what was built before.
                self._ranks.keep(Operation(atom.name, {**arguments, "name": made.name}, made.key))
                return made
            if atom.frees:
                self._ranks.forget(arguments["handle"].key)
                self._recovery.forget(arguments["handle"])
            return any(values) if atom.join == "any" else values[0]

        future = self._on_ranks(atom.name, operation, finish, facts_of(operation))
        if atom.name == "optimizer_step":
            self._recovery.stepped(list(refs_in(arguments.values())))
        return future

    def _tenants_with(self, loss: Losses | None, base: HandleRef) -> frozenset[int]:
        """Keys of the tenants that have a loss in a pass of their base; none where they are not known."""
        made = [each for each in self.journal if each.name == "create_lora_adapter" and each.arguments["handle"] == base]
        keys = {each.arguments["name"]: each.number for each in made}
        names = loss.keys() if isinstance(loss, Mapping) else ()
        return frozenset(keys[name] for name in names) if keys.keys() >= set(names) else frozenset()

    def _laid_out(self, handle: HandleRef) -> HandleRef:
        """The handle with the layout that its model has now."""
        return self._recovery.models.get(handle.key, handle)

    def _require_mine(self, arguments: Iterable[Any]) -> None:
        for each in refs_in(arguments):
            if each.group_id != self._ranks.members.id:
                raise HandleError(f"model {each.name!r} belongs to another training group", name=each.name)

    def _on_ranks[R](
        self,
        title: str,
        call: Operation | RankFunction,
        finish: Callable[[list[Any]], R],
        facts: Facts = CHANGES,
        epoch: int | None = None,
    ) -> GroupFuture[R]:
        return self._start(title, cloudpickle.dumps(call), lambda _, values: finish(values), None, facts, epoch)

    def _start[R](
        self,
        title: str,
        call: Call,
        finish: Callable[[Any, list[Any]], R],
        loss: Losses | None = None,
        facts: Facts = CHANGES,
        epoch: int | None = None,
    ) -> GroupFuture[R]:
        """The result is what ``finish`` makes of what the ranks were sent and of their results."""
        recovery = self._recovery
        kept = recovery.send(title, call, None if loss is None else self._losses.send(loss), facts, epoch)
        return GroupFuture(
            kept.title,
            lambda timeout: finish(*recovery.result(kept, timeout)),
            lambda: kept.ranks.ready(kept.outcomes),
        )


@dataclass(frozen=True)
class PinnedRanks:
    """The ranks of one epoch of a group; its calls raise :class:`~rl_backend.contracts.RanksReplacedError` when others have
    taken their place. Equal to another of the same ranks.
    """

    group: TrainGroup
    epoch: int
    layout: int = 0

    def run_on_ranks[**P, R](
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        return self.group.run_pinned(self.epoch, RankFunction(function, args, kwargs))


def _title(function: Callable[..., Any]) -> str:
    return f"run_on_ranks({getattr(function, '__qualname__', type(function).__name__)})"


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
    return TrainGroup.__new__(TrainGroup)._over(config, Recovery(ranks, None, Layout(config, len(members.workers))))


def _agreed(handle: HandleRef, versions: Sequence[int]) -> int:
    if any(version != versions[0] for version in versions):
        raise RLBackendError(f"ranks disagree on the weight version of {handle.name!r}: {versions}")
    return versions[0]
