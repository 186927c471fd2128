"""Runs of clients on one training group: each client's order kept, what waits of several trained in one pass.

A run is a LoRA tenant of the one frozen model. Its requests have numbers from 1 without gaps and run in that order, whatever
order they arrive in. One thread drives the group; everything that it is asked for ends in a :class:`Result`.
"""

from __future__ import annotations

import itertools
import logging
import math
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actors.serve.datums import Signature, check, loss_of, not_finite, sequence_of, signature_of
from actors.serve.scores import Scores, Scoring
from actors.serve.store import Result
from actors.serve.wire import Datum, PassRequest, read_pass, write_pass
from actors.train.context import HandleRef
from actors.train.group import GroupFuture, TrainGroup
from actors.train.loss import Loss
from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts import (
    AdamParams,
    BatchError,
    CheckpointError,
    ClusterLostError,
    ConfigError,
    ForwardResult,
    GroupFailedError,
    TokenSequence,
    UnsupportedError,
)
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lora.rows import padded_rank

logger = logging.getLogger(__name__)

ALPHA = 32.0
"""Of every adapter: the API has none. The change of a weight is ``32 / rank * B @ A``."""
STATE, ADAPTER = "state", "adapter"
"""In the folder of a checkpoint: training state, and the adapter in peft's format."""
# Adapters of samplers that are kept on the ranks for log-probs of prompts.
_KEPT_READERS = 4
# Steps of a run after which its state is saved, for ranks that take the place of others.
_STEPS_TO_BOUNDARY = 16
# Of passes since a run's last step, which are kept to be computed again. A few tokens can have very many.
_MOST_KEPT_TARGETS = 1 << 22
# A piece of one client's data is at most this part of a pass, so that whoever comes meanwhile does not wait for a whole one.
_SHARE_OF_A_PASS = 0.5
# Targets that count as a token of a pass, where a datum has more of them: a few tokens can have very many.
_TARGETS_OF_A_TOKEN = 32

_LOST = (GroupFailedError, ClusterLostError)
"""No client's error: training has ended."""

type Finish = Callable[[Mapping[str, Result]], None]


@dataclass(eq=False)
class Pass:
    """A request for forward_backward or forward, and how much of it has run."""

    body: bytes
    request_id: str = ""
    request: PassRequest | None = None
    loss: Loss | None = None
    targets: int = 0
    cursor: int = 0
    total: float = 0.0
    log_probs: list[np.ndarray] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.body)

    @property
    def signature(self) -> tuple[bool, Signature]:
        assert self.request is not None, "read before it is merged"
        return self.request.forward_only, signature_of(self.request.data[self.cursor], self.request.loss)

    def begin_again(self) -> None:
        self.cursor, self.total, self.log_probs = 0, 0.0, []

    def piece(self, tokens: int) -> Sequence[Datum]:
        """The next data of one signature, of at most so many tokens, at least one datum."""
        assert self.request is not None, "read before it runs"
        taken: list[Datum] = []
        first = self.signature[1]
        for datum in self.request.data[self.cursor :]:
            tokens -= _cost([datum])
            if taken and (tokens < 0 or signature_of(datum, self.request.loss) != first):
                break
            taken.append(datum)
        return taken


@dataclass(eq=False)
class Step:
    """A request for an optimizer step."""

    asked: Mapping[str, Any]
    size: int = 0
    request_id: str = ""


@dataclass(eq=False)
class Call:
    """A request for anything else about a run; ``work`` returns the answer."""

    work: Callable[[Run], Mapping[str, Any]]
    size: int = 0
    request_id: str = ""


type Job = Pass | Step | Call
"""``size`` are the bytes that it holds while it waits."""


@dataclass(eq=False)
class Run:
    """A client's adapter.

    Attributes:
        lora: as it was made, None before.
        next_seq: of the request that runs next; 0 is the creation.
        trained: whether it has gradients.
        broken: why its gradients are incomplete; the next step fails and clears them.
        passed: requests whose gradients it has, or None where they are too many to be computed again.
        again: those that are being computed again, before whatever waits; their answers are out.
        alone: whether it shares no pass, because one that it was in has failed.
        served: when it was last in a pass, as a count.
        unbound: steps since its state was last saved for new ranks, in the folder ``boundary``.
        over: why it takes no requests any more; empty while it does.
    """

    id: str
    tenant: HandleRef | None = None
    lora: LoRAConfig | None = None
    next_seq: int = 0
    waiting: dict[int, Job] = field(default_factory=dict)
    trained: bool = False
    broken: str = ""
    passed: list[Pass] | None = field(default_factory=list)
    again: list[Pass] = field(default_factory=list)
    alone: bool = False
    served: int = 0
    steps: int = 0
    unbound: int = 0
    boundary: Path | None = None
    over: str = ""

    @property
    def head(self) -> Job | None:
        return self.again[0] if self.again else self.waiting.get(self.next_seq)


@dataclass(eq=False)
class _Reading:
    folder: Path | None
    lora: LoRAConfig | None
    scoring: Scoring
    answer: Future[Scores]


class Training:
    """The training half of a server, over a group that this object alone drives from now on.

    Args:
        finish: takes answers by the ids of their requests, from the thread of this object.
        model: Hugging Face directory of the base.
        longest: tokens of a datum.
        max_rank: of an adapter, and ``max_runs`` of them at one time.
        kinds: of modules that ``train_mlp`` adapts.
        boundaries: a folder for the states from which new ranks continue; None for a group without recovery.

    Attributes:
        failed: why the group has ended; empty while it runs.
        passes, tokens, steps: done so far.
    """

    def __init__(
        self,
        group: TrainGroup,
        finish: Finish,
        *,
        model: Path,
        vocab_size: int,
        longest: int,
        max_rank: int,
        max_runs: int,
        kinds: Sequence[str] = ("feed_forward",),
        boundaries: Path | None = None,
    ) -> None:
        self._group, self._finish, self._model = group, finish, model
        self._vocab_size, self._longest = vocab_size, longest
        self._max_rank, self._max_runs, self._kinds = max_rank, max_runs, kinds
        self._boundaries = boundaries
        if boundaries is not None:
            boundaries.mkdir(parents=True, exist_ok=True)
        self.base = group.build_model(name="base", trainable=False)
        self.failed = ""
        self.passes = self.tokens = self.steps = 0
        self._runs: dict[str, Run] = {}
        self._answers: dict[str, Result] = {}
        self._steps: tuple[list[tuple[Run, AdamParams]], GroupFuture[Any]] | None = None
        self._ending: list[tuple[str, str]] = []
        self._forgotten: list[Path] = []
        self._readings: list[_Reading] = []
        self._readers: OrderedDict[Path, HandleRef] = OrderedDict()
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="training", daemon=True)
        self._thread.start()

    # What the server asks, from any thread.

    def create(self, run_id: str, request_id: str, work: Callable[[Run], Mapping[str, Any]]) -> None:
        """A new run, which ``work`` fills; the answer is what it returns. Where it raises there is no run."""
        with self._changed:
            self._runs[run_id] = Run(run_id)
        self.submit(run_id, 0, request_id, Call(work))

    def submit(self, run_id: str, seq_id: int, request_id: str, job: Job) -> None:
        """Queues a request at its place in the run's order."""
        job.request_id = request_id
        with self._changed:
            run = self._runs.get(run_id)
            over = self.failed or ("the run has ended" if run is None else run.over)
            if run is not None and not over and seq_id < run.next_seq:
                over = f"request {seq_id} of the run was answered, and its answer is not kept any more (--keep-results)"
            if run is not None and not over:
                run.waiting[seq_id] = job
                self._changed.notify()
        if over:
            self._finish({request_id: Result.failed(over, "server")})

    def is_next(self, run_id: str, seq_id: int) -> bool:
        """Whether nothing of its run has to come before a request."""
        with self._changed:
            run = self._runs.get(run_id)
            return run is None or seq_id <= run.next_seq

    @property
    def waiting_bytes(self) -> int:
        """Of requests that wait."""
        with self._changed:
            return sum(job.size for each in self._runs.values() for job in each.waiting.values())

    def end(self, run_id: str, why: str) -> None:
        """Frees the run's adapter; what waits of it, and what comes, fails."""
        with self._changed:
            self._ending.append((run_id, why))
            self._changed.notify()

    def read_log_probs(self, folder: Path | None, lora: LoRAConfig | None, scoring: Scoring) -> Future[Scores]:
        """Log-probs of the tokens of a text by the trainer's forward pass.

        Args:
            folder: of an adapter in peft's format, with its configuration; None for the base alone.
        """
        reading = _Reading(folder, lora, scoring, Future())
        with self._changed:
            self._readings.append(reading)
            self._changed.notify()
        return reading.answer

    def forget(self, folder: Path) -> None:
        """The adapter of a folder is deleted: nothing computes with it any more."""
        with self._changed:
            self._forgotten.append(folder)
            self._changed.notify()

    @property
    def waiting(self) -> dict[str, int]:
        """Requests that wait, by run; those of runs that have ended are not there."""
        with self._changed:
            return {run.id: len(run.waiting) for run in self._runs.values() if not run.over}

    def steps_of(self, run_id: str) -> int:
        run = self._runs.get(run_id)
        return 0 if run is None else run.steps

    def close(self) -> None:
        """Ends the thread after what runs now; what waits is not answered."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=5.0)

    # What runs of a client do, on the thread of this object.

    def make(self, run: Run, asked: Mapping[str, Any]) -> LoRAConfig:
        """Gives a run the adapter that a client asked for.

        Raises:
            ConfigError, UnsupportedError: it cannot be made, or there are too many.
        """
        lora = self.config_of(asked)
        self._require_room()
        run.tenant, run.lora = self._tenant(run, lora), lora
        return lora

    def config_of(self, asked: Mapping[str, Any]) -> LoRAConfig:
        rank, seed = (default if asked.get(name) is None else asked[name] for name, default in (("rank", 32), ("seed", 0)))
        if type(seed) is not int:
            raise ConfigError.of("lora_config.seed", seed, "expected a whole number")
        if type(rank) is not int or not 1 <= rank <= self._max_rank:
            raise ConfigError.of("lora_config.rank", rank, f"this server takes 1 to {self._max_rank} (--max-rank)")
        targets = [
            *(["attention"] if asked.get("train_attn", True) else []),
            *(self._kinds if asked.get("train_mlp", True) else []),
            *(["head"] if asked.get("train_unembed", True) else []),
        ]
        if not targets:
            raise ConfigError("lora_config: train_attn, train_mlp and train_unembed are all false; nothing would be trained")
        # As the hosted service trains mixtures.
        shares = "experts" in targets
        return LoRAConfig(rank=rank, alpha=ALPHA, targets=tuple(targets), experts_share_factor=shares, seed=seed)

    def save(self, run: Run, folder: Path, *, state: bool) -> None:
        """Writes the adapter, with ``state`` what training continues from as well. ``folder`` is complete or not there."""
        tenant, lora = _made(run)
        try:
            folder.mkdir(parents=True)
            if state:
                self._group.save_checkpoint(tenant, folder / STATE)
                # New ranks must not look for a checkpoint that its owner may delete.
                run.unbound = _STEPS_TO_BOUNDARY
            write_peft_directory(folder / ADAPTER, self._group.export_lora_adapter(tenant).items(), lora, str(self._model))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def load(self, run: Run, folder: Path, asked: Mapping[str, Any], *, optimizer: bool) -> None:
        """Gives a run the adapter of a checkpoint: with its optimizer, or with one that has taken no step."""
        lora, before = self.config_of(asked), run.tenant
        if before is None:
            self._require_room()
        elif run.lora is not None and (run.lora.rank, run.lora.targets) != (lora.rank, lora.targets):
            raise ConfigError(
                f"load_weights: the checkpoint has rank {lora.rank} and targets {', '.join(lora.targets)}, the run rank "
                f"{run.lora.rank} and {', '.join(run.lora.targets)}; create a run from the checkpoint instead"
            )
        tenant = self._tenant(run, lora)
        try:
            if optimizer:
                self._group.load_checkpoint(tenant, folder / STATE)
            else:
                self._group.import_lora_adapter(tenant, folder / ADAPTER)
        except BaseException:
            self._group.remove_lora_adapter(tenant)
            raise
        run.tenant, run.lora, run.trained, run.broken, run.passed = tenant, lora, False, "", []
        run.unbound = _STEPS_TO_BOUNDARY
        if before is not None:
            self._group.remove_lora_adapter(before)

    # The thread.

    def _tenant(self, run: Run, lora: LoRAConfig) -> HandleRef:
        return self._group.create_lora_adapter(self.base, lora, name=f"{run.id}#{next(self._numbers)}")

    def _require_room(self) -> None:
        live = sum(run.tenant is not None and not run.over for run in self._runs.values())
        if live >= self._max_runs:
            raise ConfigError(f"{live} runs are live, as many as this server takes (--max-runs); end one, or wait")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._ending or self._forgotten or self._readings or self._heads()
                )
                if self._closing:
                    self._answer()
                    return
                ending, self._ending = self._ending, []
                forgotten, self._forgotten = self._forgotten, []
                readings = self._next_readings()
                heads = self._heads()
            try:
                self._call([run for run in heads if isinstance(run.head, Call)])
                # The group gets steps and a pass at one time, and works while what was before is answered.
                self._step([run for run in heads if isinstance(run.head, Step)])
                # Before the next pass: a run whose requests wait in a row has gradients at any other time.
                self._bound()
                self._pass([run for run in heads if isinstance(run.head, Pass)])
                self._settle()
                if readings:
                    self._answer()
                self._read(readings)
                for folder in forgotten:
                    self._drop_reader(folder)
                for run_id, why in ending:
                    self._end(run_id, why)
                if not self._has_work:
                    self._answer()
            except Exception as error:  # noqa: BLE001 what belongs to a client is answered before it comes here
                self._lose(error, readings)

    def _next_readings(self) -> list[_Reading]:
        """The first of those that wait, for which one pass has room: training goes on between passes."""
        left, taken = self._budget, 0
        for reading in self._readings:
            left -= len(reading.scoring.tokens)
            if taken and left < 0:
                break
            taken += 1
        now, self._readings = self._readings[:taken], self._readings[taken:]
        return now

    @property
    def _budget(self) -> int:
        """Tokens of a pass."""
        return int(self._group.config.max_tokens_per_micro_batch) * self.base.data_parallel_size

    @property
    def _has_work(self) -> bool:
        """Whether the group is asked for something next."""
        with self._changed:
            return not self._closing and any(isinstance(run.head, Pass | Step) for run in self._heads())

    def _heads(self) -> list[Run]:
        return [run for run in self._runs.values() if not run.over and run.head is not None]

    def _end(self, run_id: str, why: str) -> None:
        with self._changed:
            run = self._runs.pop(run_id, None)
            if run is None:
                return
            run.over = why
        self._fail_waiting(run)
        if run.tenant is not None:
            self._group.remove_lora_adapter(run.tenant)
        if run.boundary is not None:
            shutil.rmtree(run.boundary, ignore_errors=True)

    def _bound(self) -> None:
        """Saves states of runs: ranks that take the place of others continue from there."""
        if self._boundaries is None:
            return
        full = self._group.wants_boundary
        for run in list(self._runs.values()):
            due = run.unbound >= _STEPS_TO_BOUNDARY or (full and run.unbound > 0)
            # A state has no gradients.
            if run.tenant is None or run.trained or not due:
                continue
            run.unbound, folder = 0, self._boundaries / uuid.uuid4().hex
            try:
                self._group.save_checkpoint(run.tenant, folder)
            except CheckpointError as error:
                logger.warning("the state of run %r could not be saved for new ranks: %s", run.id, error)
                continue
            self._group.bound(run.tenant, folder, folder)
            before, run.boundary = run.boundary, folder
            if before is not None:
                shutil.rmtree(before, ignore_errors=True)

    def _fail_waiting(self, run: Run) -> None:
        self._answers |= {job.request_id: Result.failed(run.over, "server") for job in run.waiting.values()}
        run.waiting.clear()

    def _done(self, run: Run, result: Result) -> None:
        if run.again:
            run.again.pop(0)
            return
        with self._changed:
            job = run.waiting.pop(run.next_seq)
            run.next_seq += 1
        run.alone = False
        self._answers[job.request_id] = result

    def _answer(self) -> None:
        """Gives away what was found since the last time."""
        if self._answers:
            self._finish(self._answers)
            self._answers = {}

    @contextmanager
    def _fails_alone(self, run: Run) -> Iterator[None]:
        """Inside, an error is the answer to the run's request; only the end of the group is nobody's own."""
        try:
            yield
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001 it is answered
            self._done(run, Result.of_error(error))

    def _call(self, runs: Sequence[Run]) -> None:
        for run in runs:
            # It may take long.
            self._answer()
            job = run.head
            assert isinstance(job, Call), "chosen by its kind"
            with self._fails_alone(run):
                self._done(run, Result.of(job.work(run)))
            if run.tenant is None:
                self.end(run.id, "the run could not be created")

    def _step(self, runs: Sequence[Run]) -> None:
        """One step of each, in one operation of the group."""
        able: list[tuple[Run, HandleRef, AdamParams]] = []
        for run in runs:
            with self._fails_alone(run):
                able.append((run, *_step_of(run)))
        if not able:
            return
        tenants = [tenant for _, tenant, _ in able]
        step = self._group.optimizer_step.submit(tenants, adam=[adam for _, _, adam in able], zero_grad=True)
        for run, _, _ in able:
            run.trained, run.passed = False, []
            run.unbound += 1
        self._steps = [(run, adam) for run, _, adam in able], step

    def _settle(self) -> None:
        """Answers the steps that were sent last."""
        if self._steps is None:
            return
        (runs, sent), self._steps = self._steps, None
        for (run, adam), result in zip(runs, sent.result(), strict=True):
            with self._fails_alone(run):
                if not result.ok:
                    why = result.error or "a gradient is not finite; weights and optimizer are as they were, gradients gone"
                    raise BatchError(f"optim_step: {why}")
                run.steps += 1
                self.steps += 1
                self._done(run, Result.of({"metrics": {"grad_norm": result.grad_norm, "learning_rate": adam.lr}}))

    def _pass(self, runs: Sequence[Run]) -> None:
        """One pass with a piece of each of those that fit together; who waited longest for a pass is in it."""
        ready = [run for run in runs if self._prepare(run)]
        if not ready:
            return
        ready.sort(key=lambda run: run.served)
        budget = self._budget
        first = _job(ready[0]).signature
        chosen: list[tuple[Run, Sequence[Datum]]] = []
        room, most = budget, int(budget * _SHARE_OF_A_PASS)
        for run in ready:
            if chosen and (run.alone or chosen[0][0].alone):
                continue
            job = _job(run)
            piece = job.piece(most) if job.signature == first else ()
            tokens = _cost(piece)
            if piece and (not chosen or tokens <= room):
                chosen.append((run, piece))
                room -= tokens
        # Adapters of one shape, and as many rows, beside each other are one product.
        chosen.sort(key=lambda each: (padded_rank(_made(each[0])[1].rank), _made(each[0])[1].targets, _rows(each[1])))
        self._try_pass(chosen, forward_only=first[0])

    def _try_pass(self, chosen: Sequence[tuple[Run, Sequence[Datum]]], *, forward_only: bool) -> None:
        """A pass whose failure is answered to the client that it is of: where several shared it, each is tried alone."""
        sent = self._send(chosen, forward_only=forward_only)
        # While the group works.
        self._settle()
        self._answer()
        self._read_ahead()
        try:
            result = sent.result()
        except _LOST:
            raise
        except BatchError as error:
            # Refused before anything ran.
            if len(chosen) > 1:
                for each in chosen:
                    self._try_pass([each], forward_only=forward_only)
            elif _job(chosen[0][0]).cursor or chosen[0][0].again:
                self._break(chosen[0][0], error)
            else:
                self._done(chosen[0][0], Result.of_error(error))
        except Exception as error:
            if len(chosen) > 1:
                logger.warning("a pass of several runs failed, and each is tried alone", exc_info=error)
            for run, _ in chosen:
                if len(chosen) > 1 and (run.passed is not None or forward_only):
                    self._begin_again(run)
                else:
                    self._break(run, error)
        else:
            self.passes += 1
            for run, piece in chosen:
                self._take(run, piece, result.tenants[_made(run)[0].name])

    def _begin_again(self, run: Run) -> None:
        """After a pass with others that has failed in the middle: gradients are computed again, in passes without others."""
        job, run.alone = _job(run), True
        job.begin_again()
        if _request(run).forward_only:
            return
        self._group.zero_grad(_made(run)[0])
        run.again, run.passed, run.trained = run.passed or [], [], False

    def _prepare(self, run: Run) -> bool:
        """Whether a request for a pass can be run; one that is wrong is answered here."""
        with self._fails_alone(run):
            request = self._read_pass(run, _job(run))
            if run.broken and not request.forward_only:
                raise BatchError(f"forward_backward: its gradients would be added to incomplete ones: {run.broken}")
            if request.data:
                return True
            self._done(run, Result.of(write_pass([], {"loss:sum": 0.0})))
        return False

    def _read_ahead(self) -> None:
        """Reads what came meanwhile."""
        with self._changed:
            heads = self._heads()
        for run in heads:
            if isinstance(run.head, Pass):
                # What is wrong with a request is said when it would run, in its place among the answers.
                with suppress(Exception):
                    self._read_pass(run, run.head)

    def _read_pass(self, run: Run, job: Pass) -> PassRequest:
        """Raises what is wrong with a request."""
        if job.request is None:
            _made(run)
            request = read_pass(job.body)
            job.loss = loss_of(request.loss, request.loss_options)
            for number, datum in enumerate(request.data):
                check(
                    f"datum {number}",
                    datum,
                    request.loss,
                    vocab_size=self._vocab_size,
                    longest=self._longest,
                    forward_only=request.forward_only,
                )
            job.targets = sum(datum.inputs["target_tokens"].size for datum in request.data)
            job.request, job.body = request, b""
        return job.request

    def _send(
        self, chosen: Sequence[tuple[Run, Sequence[Datum]]], *, forward_only: bool
    ) -> Future[ForwardResult] | GroupFuture[ForwardResult]:
        rows: list[TokenSequence] = []
        losses: dict[str, Loss] = {}
        for run, piece in chosen:
            tenant, loss = _made(run)[0], _job(run).loss
            assert loss is not None, "prepared"
            rows += [sequence_of(datum, _request(run).loss, tenant.lora_id) for datum in piece]
            losses[tenant.name] = loss
        try:
            return self._group.forward_backward.submit(self.base, rows, losses, forward_only=forward_only)
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001 raised where the result is read
            refused = Future[ForwardResult]()
            refused.set_exception(error)
            return refused

    def _take(self, run: Run, piece: Sequence[Datum], part: ForwardResult) -> None:
        """What a run has of a pass: an answer when it is the last of its request."""
        job, request = _job(run), _request(run)
        run.served = self.passes
        run.trained |= not request.forward_only
        self.tokens += _rows(piece)
        log_probs = [values.float().numpy() for values in part.output("log_probs")]
        problem = part.error
        if not (problem or request.forward_only or math.isfinite(part.loss)):
            problem = not_finite(job.cursor, piece, log_probs)
        if problem:
            self._break(run, BatchError(f"loss_fn={request.loss!r}: {problem}"))
            return
        job.total += part.loss
        job.log_probs += log_probs
        job.cursor += len(piece)
        if job.cursor < len(request.data):
            return
        answer = write_pass(job.log_probs, {"loss:sum": job.total})
        if not request.forward_only and run.passed is not None:
            job.begin_again()
            run.passed.append(job)
            if sum(each.targets for each in run.passed) > _MOST_KEPT_TARGETS:
                run.passed = None
        self._done(run, Result.of(answer))

    def _break(self, run: Run, error: Exception) -> None:
        """Of a request that has failed in its pass."""
        if _request(run).forward_only:
            self._done(run, Result.of_error(error))
            return
        self._group.zero_grad(_made(run)[0])
        run.broken, run.trained = f"a forward_backward before it failed ({error})", False
        was_answered, run.again, run.passed = bool(run.again), [], []
        if not was_answered:
            self._done(run, Result.of_error(error))

    def _read(self, readings: Sequence[_Reading]) -> None:
        """Readings of one adapter and one kind in one pass."""
        together: dict[tuple[Any, ...], list[_Reading]] = {}
        for reading in readings:
            if reading.answer.set_running_or_notify_cancel():
                together.setdefault((reading.folder, *reading.scoring.kind), []).append(reading)
        for each in together.values():
            self._read_together(each)

    def _read_together(self, readings: Sequence[_Reading]) -> None:
        first = readings[0]
        try:
            handle = self.base if first.folder is None else self._reader(first.folder, first.lora)
            result = self._group.forward(handle, [each.scoring.row for each in readings], meta=first.scoring.meta)
            found = [each.scoring.scores(result, index) for index, each in enumerate(readings)]
        except _LOST:
            raise
        except Exception as error:  # noqa: BLE001 whoever asked is told
            if len(readings) == 1:
                first.answer.set_exception(error)
                return
            for reading in readings:
                self._read_together([reading])
            return
        for reading, scores in zip(readings, found, strict=True):
            reading.answer.set_result(scores)

    def _reader(self, folder: Path, lora: LoRAConfig | None) -> HandleRef:
        """An adapter that only computes."""
        assert lora is not None, "an adapter has a configuration"
        if folder not in self._readers:
            reader = self._group.create_lora_adapter(self.base, lora, name=f"reader#{next(self._numbers)}")
            try:
                self._group.import_lora_adapter(reader, folder)
            except BaseException:
                self._group.remove_lora_adapter(reader)
                raise
            self._readers[folder] = reader
            if len(self._readers) > _KEPT_READERS:
                self._drop_reader(next(iter(self._readers)))
        self._readers.move_to_end(folder)
        return self._readers[folder]

    def _drop_reader(self, folder: Path) -> None:
        if folder in self._readers:
            self._group.remove_lora_adapter(self._readers.pop(folder))

    def _lose(self, error: Exception, readings: Sequence[_Reading]) -> None:
        logger.error("training has ended", exc_info=error)
        self._steps = None
        with self._changed:
            self.failed = f"training has ended ({type(error).__name__}: {error}); restart the server"
            for run in self._runs.values():
                run.over = run.over or self.failed
            readings = [*readings, *self._readings]
            self._readings.clear()
        for run in self._runs.values():
            self._fail_waiting(run)
        self._answer()
        for reading in readings:
            answer = reading.answer
            # Whoever asked may go at any moment, until it is running.
            if answer.running() or (not answer.done() and answer.set_running_or_notify_cancel()):
                answer.set_exception(error)


def adam_of(asked: Mapping[str, Any]) -> AdamParams:
    """The values of a step: what the API's AdamParams says, with its defaults.

    Raises:
        ConfigError: a value that AdamW cannot have.
        UnsupportedError: another optimizer.
    """
    params = asked.get("adam_params")
    if params is None:
        params = asked.get("optimizer_params")
        given = params.get("type") if isinstance(params, Mapping) else params
        if given not in ("adamw", "adam"):
            raise UnsupportedError(f"optim_step: optimizer {given!r} is not served here; give adam_params")
    if not isinstance(params, Mapping):
        raise BatchError(f"optim_step: adam_params={params!r}: expected an object")
    return AdamParams(
        lr=params.get("learning_rate", 1e-4),
        betas=(params.get("beta1", 0.9), params.get("beta2", 0.95)),
        eps=params.get("eps", 1e-12),
        weight_decay=params.get("weight_decay", 0.0),
        clip_grad=params.get("grad_clip_norm", 0.0),
    )


def _step_of(run: Run) -> tuple[HandleRef, AdamParams]:
    """Raises what is wrong with a request for a step."""
    job = run.head
    assert isinstance(job, Step), "chosen by its kind"
    # Whatever comes of the step, gradients begin anew after it.
    broken, run.broken = run.broken, ""
    tenant, adam = _made(run)[0], adam_of(job.asked)
    if broken:
        raise BatchError(f"optim_step: nothing was changed, and gradients are dropped: {broken}")
    if not run.trained:
        raise BatchError("optim_step: no forward_backward since the last step, so there are no gradients")
    return tenant, adam


def _cost(data: Sequence[Datum]) -> int:
    """Tokens of data, as passes count them."""
    return sum(max(len(datum.tokens), datum.inputs["target_tokens"].size // _TARGETS_OF_A_TOKEN) for datum in data)


def _rows(data: Sequence[Datum]) -> int:
    return sum(len(datum.tokens) for datum in data)


def _made(run: Run) -> tuple[HandleRef, LoRAConfig]:
    if run.tenant is None or run.lora is None:
        raise BatchError("the run could not be created")
    return run.tenant, run.lora


def _job(run: Run) -> Pass:
    assert isinstance(run.head, Pass), "chosen by its kind"
    return run.head


def _request(run: Run) -> PassRequest:
    request = _job(run).request
    assert request is not None, "prepared"
    return request
