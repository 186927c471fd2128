"""The ranks of a training group: their start, numbered dispatch, and what happens when one fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.cluster.placement import PlacementStrategy, Reservation, memory_environment, reserve, thread_environment
from actors.cluster.ray_watch import memory_death, memory_held, ray_is_usable
from actors.cluster.rendezvous import rendezvous_address
from actors.train.loss import SentLoss
from actors.train.order import Driver, OperationHeader, this_thread
from actors.train.outcome import AFTERWARDS, Completed, Failed, RankInfo, breaks_process_group, with_origin
from actors.train.pulse import (
    LOOK_SECONDS,
    PEER_SECONDS,
    STARTING,
    PeersOfFailed,
    Pulse,
    StoppedRanks,
    WaitBounds,
    places_in_code,
)
from actors.train.worker import TrainActor
from rl_backend.contracts import (
    ConfigError,
    GroupFailedError,
    HandleError,
    OperationOrderError,
    RLBackendError,
    RuntimeConfig,
)
from rl_backend.contracts.atoms import Operation
from rl_backend.lab.text import duration
from rl_backend.runtime import check_config

POLL_SECONDS = 0.02
LEDGER_TIMEOUT_SECONDS = 30.0
_DIED = (ActorDiedError, ActorUnavailableError, OutOfMemoryError)


@dataclass(frozen=True)
class GroupMembers:
    id: str
    name: str
    workers: tuple[ActorHandle, ...]
    placement_group: PlacementGroup
    failure_grace: float

    def kill(self) -> None:
        """Ends every rank and gives its resources back. Does nothing once Ray is shut down or lost, which did the same."""
        if ray_is_usable():
            for worker in self.workers:
                ray.kill(worker)
            remove_placement_group(self.placement_group)


class TrainRanks:
    """One driver's access to the members.

    Attributes:
        journal: the operations that built the group's models, to this driver's knowledge.
        bounds: of the waits for a rank; None waits as long as the ranks live.
        peak_memory: bytes, of the rank that has held most; as of the last results that this driver has read.
    """

    def __init__(self, members: GroupMembers, driver: Driver, *, owned: bool) -> None:
        self.members = members
        self.driver = driver
        self.infos: tuple[RankInfo, ...] = ()
        self._owned = owned
        self.operator = driver.description
        self.journal: list[Operation] = []
        self.bounds: WaitBounds | None = None
        self.peak_memory = 0
        self._stopped: StoppedRanks | None = None
        self._acknowledged = frozenset[int]()
        self._taken_over = 0
        self._lock = threading.RLock()
        self._ended: RLBackendError | None = None

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def located(self, infos: Sequence[RankInfo]) -> None:
        """These are the ranks' places; from now on it is seen when one is stopped."""
        self.infos, self.bounds, self._stopped = tuple(infos), STARTING, StoppedRanks(infos)

    def dispatch(
        self, name: str, pickled_calls: Sequence[bytes], loss: SentLoss | None = None
    ) -> tuple[OperationHeader, list[tuple[ray.ObjectRef, ray.ObjectRef]]]:
        """Starts the next operation: call r on rank r. Of each rank its outcome, and what it leaves in the object store."""
        with self._lock:
            self.check_usable()
            try:
                number = self._control("begin", self.driver, name)
                if isinstance(number, Driver):
                    self._owned, self.operator = False, number.description
                    self.check_usable()
                header = OperationHeader(number, name, this_thread.number, self._acknowledged, self._taken_over)
                refs = self._send(header, pickled_calls, loss)
            except RLBackendError:
                raise
            except BaseException as error:
                # A number that some ranks never see would have every later operation refused, or wait for them.
                with suppress(GroupFailedError):
                    self.fail(
                        f"{type(error).__name__} interrupted the start of {name}, which not all ranks may have received"
                    )
                raise
            return header, refs

    def repeat(
        self, header: OperationHeader, pickled_calls: Sequence[bytes], loss: SentLoss | None, after: int
    ) -> list[tuple[ray.ObjectRef, ray.ObjectRef]]:
        """Sends an operation of ranks that died under the number that it had there, ``after`` the one before."""
        with self._lock:
            self._check_alive()
            header = replace(header, after=after, acknowledged=self._acknowledged, taken_over=self._taken_over)
            return self._send(header, pickled_calls, loss)

    def take_place_of(self, lost: TrainRanks, number: int) -> None:
        """These are the ranks of the group from now on, whose last operation had this number."""
        self.journal, self.peak_memory, self.bounds = list(lost.journal), lost.peak_memory, lost.bounds
        self._acknowledged, self._taken_over = lost._acknowledged, lost._taken_over
        self._control("resume", number, self.journal)

    def collect(self, title: str, number: int, refs: Sequence[ray.ObjectRef], timeout: float | None) -> list[Any]:
        """One value per rank; raises as :meth:`~actors.train.group.GroupFuture.result`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pulse, peers = self._pulse(), PeersOfFailed()
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        pending = list(refs)
        values: dict[int, Any] = {}
        failures: dict[int, Failed] = {}
        while pending:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            pause = PEER_SECONDS if failures else LOOK_SECONDS
            look = pulse is not None and (wait is None or wait > pause)
            ready, pending = ray.wait(pending, num_returns=1, timeout=pause if look else wait)
            silent = [] if ready else [rank_of[ref] for ref in pending]
            if not ready and pulse is not None and look:
                self._require_alive(f"in {title}", pulse)
                self._say_long_wait(title, pulse, silent)
                if failures and peers.look([info for info in self.infos if info.rank in silent]):
                    self._stop_peers(title, failures, silent, "wait in a collective")
                continue
            if not ready:
                if failures:
                    seconds = f"{self.members.failure_grace:g} s"
                    most_likely = f"gave no answer within {seconds}, most likely waiting for it in a collective"
                    self._stop_peers(title, failures, silent, most_likely)
                raise TimeoutError(f"{title} of training group {self.members.name!r} is not done after {timeout:g} s")
            outcome = self._outcome(title, rank_of[ready[0]], ready[0], pending, rank_of, failures)
            if isinstance(outcome, Completed):
                values[rank_of[ready[0]]] = outcome.value
                self.peak_memory = max(self.peak_memory, outcome.peak_memory)
            else:
                if not failures:
                    # Peers that do not fail as well are most likely in a collective, and would wait for it until it times
                    # out. On a GPU that cannot be seen.
                    deadline = time.monotonic() + self.members.failure_grace
                failures[rank_of[ready[0]]] = outcome
        if failures:
            self._raise(title, number, failures)
        return [values[rank] for rank in range(len(refs))]

    def has_answered(self, refs: Sequence[ray.ObjectRef]) -> bool:
        """Whether all ranks have, and none because a peer was gone."""
        try:
            outcomes = ray.get(list(refs), timeout=0.1)
        except RayError:
            return False
        return not any(isinstance(each, Failed) and breaks_process_group(each.error) for each in outcomes)

    def ready(self, refs: Sequence[ray.ObjectRef]) -> bool:
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        return len(done) == len(refs)

    def keep(self, operation: Operation) -> None:
        self.journal.append(operation)
        self._tell("keep", operation)

    def forget(self, key: int) -> None:
        self.journal = [each for each in self.journal if each.number != key]
        self._tell("forget", key)

    def take_over(self, timeout: float) -> None:
        with self._lock:
            self._check_alive()
            number, name, previous, self.journal = self._control("transfer", self.driver)
            deadline = time.monotonic() + timeout
            while True:
                asked = [worker.progress.remote() for worker in self.members.workers]
                progress = [self._answer(rank, ref) for rank, ref in enumerate(asked)]
                if all(finished >= number for _, finished in progress):
                    break
                if time.monotonic() > deadline:
                    lost = [rank for rank, (started, _) in enumerate(progress) if started < number]
                    running = [rank for rank, (started, done) in enumerate(progress) if started >= number > done]
                    raise OperationOrderError(
                        f"operation {number} ({name}) of {previous.description} is not finished after {timeout:g} s: it "
                        f"runs on ranks {running} and has not arrived on ranks {lost}; call take_over() again, or build a "
                        "new group if that driver is gone",
                        number=number,
                        running=running,
                        not_arrived=lost,
                    )
                time.sleep(POLL_SECONDS)
            self._owned, self.operator, self._taken_over = True, self.driver.description, number

    def check_usable(self) -> None:
        self._check_alive()
        if not self._owned:
            raise OperationOrderError(
                f"training group {self.members.name!r} is operated by {self.operator}, and this is "
                f"{self.driver.description}; call take_over() on this copy to operate it from here",
                owner=self.operator,
            )

    def end(self) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = HandleError(f"training group {self.members.name!r} was shut down")
            self._kill()

    def fail(self, message: str, *, cause: Exception | None = None, **details: Any) -> NoReturn:
        """Stops every rank and raises :class:`~rl_backend.contracts.GroupFailedError`, now and at every later call."""
        error = GroupFailedError(f"training group {self.members.name!r}: {message}; {AFTERWARDS}", **details)
        if self._ended is None:
            self._ended = error
            self._kill()
        raise error from cause

    def _kill(self) -> None:
        if self._stopped is not None:
            self._stopped.close()
        self.members.kill()

    def _send(
        self, header: OperationHeader, pickled_calls: Sequence[bytes], loss: SentLoss | None
    ) -> list[tuple[ray.ObjectRef, ray.ObjectRef]]:
        workers = self.members.workers
        return [worker.execute.remote(header, call, loss) for worker, call in zip(workers, pickled_calls, strict=True)]

    def _pulse(self) -> Pulse | None:
        stopped = {} if self._stopped is None else self._stopped.seconds
        return None if self.bounds is None else Pulse(self.members.workers, self.bounds, stopped)

    def _require_alive(self, when: str, pulse: Pulse) -> None:
        if (found := pulse.look()) is not None:
            ranks, how = found
            self.fail(f"{self._named(ranks)} {how} {when}{self._places_in_code(ranks)}", ranks=ranks, hung=True)

    def _say_long_wait(self, title: str, pulse: Pulse, ranks: Sequence[int]) -> None:
        if seconds := pulse.long_wait():
            who = f"{duration(seconds)} for rank {', '.join(map(str, ranks))}{self._places_in_code(ranks)}"
            logger.warning("training group %r: %s has waited %s", self.members.name, title, who)

    def _named(self, ranks: Sequence[int]) -> str:
        places = ", ".join(f"process {info.pid} on {info.node_ip}" for info in self.infos if info.rank in ranks)
        return f"rank {', '.join(map(str, ranks))}{f' ({places})' if places else ''}"

    def _places_in_code(self, ranks: Sequence[int]) -> str:
        found = places_in_code([info for info in self.infos if info.rank in ranks])
        return "".join(f"; rank {rank} is in {place.calls}" for rank, place in found.items())

    def _check_alive(self) -> None:
        if self._ended is not None:
            # A new object each time: one that is raised twice would gather the tracebacks and notes of both.
            raise type(self._ended)(self._ended.message, **self._ended.details)

    def _control(self, method: str, *arguments: Any) -> Any:
        return self._answer(0, getattr(self.members.workers[0], method).remote(*arguments))

    def _tell(self, method: str, *arguments: Any) -> None:
        # What the journal here has is told to those that take the place of a dead one, too; else the next operation raises.
        with suppress(GroupFailedError):
            self._control(method, *arguments)

    def _answer(self, rank: int, ref: ray.ObjectRef) -> Any:
        pulse = None
        while True:
            try:
                return ray.get(ref, timeout=LEDGER_TIMEOUT_SECONDS if self.bounds is None else LOOK_SECONDS)
            except GetTimeoutError:
                pulse = pulse or self._pulse()
                if pulse is None:
                    self.fail(f"rank {rank} does not answer", ranks=[rank])
                self._require_alive("between operations", pulse)
            except RayError as error:
                self._rank_died("between operations", {rank: error})

    def _outcome(
        self,
        title: str,
        rank: int,
        ref: ray.ObjectRef,
        pending: Sequence[ray.ObjectRef],
        rank_of: Mapping[ray.ObjectRef, int],
        failures: Mapping[int, Failed],
    ) -> Completed | Failed:
        try:
            return ray.get(ref)  # type: ignore[no-any-return]
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error.cause))
            return Failed(cause, str(error))
        except _DIED as error:
            died: dict[int, Exception] = {rank: error}
            # Ranks that died together are named together.
            more, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0) if pending else ([], [])
            for other in more:
                try:
                    ray.get(other)
                except _DIED as other_error:
                    died[rank_of[other]] = other_error
                except RayError:
                    continue
            first = next(iter(failures.items()), None)
            self._rank_died(f"during {title}", died, first)
        except RayError as error:
            return Failed(error, str(error))

    def _rank_died(self, when: str, died: Mapping[int, Exception], first: tuple[int, Failed] | None = None) -> NoReturn:
        ranks = sorted(died)
        seen = f"; rank {first[0]} reported {first[1].error!r}" if first else ""
        reason = memory_death(died[ranks[0]]) or " ".join(str(died[ranks[0]]).split())
        self.fail(
            f"{self._named(ranks)} died {when}{seen}; Ray says: {reason}",
            cause=died[ranks[0]],
            ranks=ranks,
            reason=reason,
            memory=memory_held(),
        )

    def _stop_peers(self, title: str, failures: Mapping[int, Failed], silent: Sequence[int], how: str) -> NoReturn:
        rank, failure = next(iter(failures.items()))
        cause = with_origin(failure, rank)
        self.fail(
            f"rank {rank} failed in {title} with {cause!r} while ranks {sorted(silent)} {how}{self._places_in_code(silent)}",
            cause=cause,
            ranks=sorted(failures),
            silent=sorted(silent),
            error=repr(cause),
            remote_traceback=failure.traceback,
        )

    def _raise(self, title: str, number: int, failures: Mapping[int, Failed]) -> NoReturn:
        """Every rank answered: raises the lowest rank's error, typed ones first, or the one that it points to."""
        # An operation that was refused for an earlier one tells of that failure too.
        refused = [failure.error for failure in failures.values() if isinstance(failure.error, OperationOrderError)]
        with self._lock:
            self._acknowledged |= {number, *(error.details["failed"] for error in refused if "failed" in error.details)}
        broken = [rank for rank in sorted(failures) if breaks_process_group(failures[rank].error)]
        typed = [rank for rank in sorted(failures) if isinstance(failures[rank].error, RLBackendError)]
        # An error of ours says what is wrong; a broken collective only that some peer has failed.
        rank = (typed or sorted(set(failures) - set(broken)) or broken)[0]
        raised = failures[rank].error
        if isinstance(raised, RLBackendError) and raised.details.get("rank") in typed:
            rank = raised.details["rank"]
        error = with_origin(failures[rank], rank)
        if broken:
            self.fail(
                f"a collective of {title} failed on ranks {broken}: {error!r}",
                cause=error,
                ranks=broken,
                error=repr(error),
                remote_traceback=failures[rank].traceback,
            )
        if isinstance(error, RLBackendError):
            error.details.setdefault("failed_ranks", sorted(failures))
        raise error


logger = logging.getLogger(__name__)


def start_ranks(
    config: RuntimeConfig,
    *,
    group_id: str,
    name: str,
    num_ranks: int,
    cores_per_rank: int,
    gpus_per_rank: float,
    placement: PlacementStrategy,
    failure_grace: float,
    placement_timeout: float,
    start_timeout: float,
    driver: Driver | None = None,
    epoch: int = 0,
) -> TrainRanks:
    """Reserves resources, starts one actor per rank and builds the runtimes; frees everything when that fails.

    Args:
        driver: of ranks that take the place of others, the one that operates those.
        epoch: how many such groups of ranks there were before.
    """
    _check_device(config, gpus_per_rank)
    check_config(config, num_ranks)
    placed = reserve(
        num_ranks=num_ranks,
        cores_per_rank=cores_per_rank,
        gpus_per_rank=gpus_per_rank,
        strategy=placement,
        name=name,
        timeout=placement_timeout,
    )
    _warn_of_idle_gpus(config, name, gpus_per_rank)
    prefix = name if group_id[:8] in name else f"{name}-{group_id[:8]}"
    # Ray may still have the name of a rank that died.
    prefix += f"-again{epoch}" if epoch else ""
    try:
        driver = driver or Driver.here()
        workers = tuple(
            TrainActor.options(
                name=f"{prefix}-rank{rank}",
                num_cpus=cores_per_rank,
                num_gpus=gpus_per_rank,
                scheduling_strategy=placed.scheduling_strategy(rank),
                allow_out_of_order_execution=False,
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": _process_environment(cores_per_rank, gpus_per_rank)},
            ).remote(group_id, rank, num_ranks, cores_per_rank, driver)
            for rank in range(num_ranks)
        )
        ranks = TrainRanks(GroupMembers(group_id, name, workers, placed.group, failure_grace), driver, owned=True)
        environments = [_rank_environment(rank, num_ranks, placed, gpus_per_rank) for rank in range(num_ranks)]
        _begin(ranks, environments, config, start_timeout)
        return ranks
    except BaseException:
        placed.remove()
        raise


def _begin(ranks: TrainRanks, environments: Sequence[Mapping[str, str]], config: RuntimeConfig, timeout: float) -> None:
    workers = ranks.members.workers
    try:
        # Waiting for every process first keeps a slow one from looking like one that hangs.
        ranks.located(ranks.collect("start", 0, [worker.locate.remote() for worker in workers], timeout))
        nodes = [info.node_ip for info in ranks.infos]
        (rendezvous,) = ranks.collect("start", 0, [workers[0].open_rendezvous.remote(rendezvous_address(nodes))], timeout)
        pickled, pairs = cloudpickle.dumps(config), zip(workers, environments, strict=True)
        refs = [worker.start.remote(environment, rendezvous, pickled) for worker, environment in pairs]
        ranks.collect("start", 0, refs, timeout)
    except TimeoutError:
        ranks.fail(f"the ranks did not start within {timeout:g} s; see Ray's logs, or raise start_timeout")
    except BaseException:
        ranks.end()
        raise


def _warn_of_idle_gpus(config: RuntimeConfig, name: str, gpus_per_rank: float) -> None:
    if getattr(config.backend_cfg, "device", "auto") != "auto" or gpus_per_rank:
        return
    if count := int(ray.cluster_resources().get("GPU", 0)):
        logger.warning(
            "%s trains on CPUs although the cluster has %d GPUs: a rank takes none unless gpus_per_rank says so. Use "
            "gpus_per_rank=1, or device='cpu' in the configuration",
            name,
            count,
        )


def _check_device(config: RuntimeConfig, gpus_per_rank: float) -> None:
    device = getattr(config.backend_cfg, "device", "auto")
    if device != "auto" and (device == "cuda") != (gpus_per_rank > 0):
        wanted = f"the configuration has device={device!r}; use gpus_per_rank={int(device == 'cuda')}"
        raise ConfigError.of("gpus_per_rank", gpus_per_rank, wanted)


def _process_environment(cores: int, gpus: float) -> dict[str, str]:
    threads = {name: str(cores) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    # Without a GPU of its own a rank must not see those of others; with one, Ray sets this.
    return threads if gpus else {**threads, **thread_environment(), **memory_environment(), "CUDA_VISIBLE_DEVICES": ""}


def _rank_environment(rank: int, num_ranks: int, placed: Reservation, gpus: float) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0" if gpus else str(placed.slots[rank].index_on_node),
    }
