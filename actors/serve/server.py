"""What the routes of the server do: sessions, runs, checkpoints, samplers, and the futures that answer requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Table
from sqlalchemy.exc import OperationalError

from actors.serve.external import Links, encrypt, recipients_in
from actors.serve.sampling import Sampling, Score
from actors.serve.scores import Scores, Scoring
from actors.serve.store import CHECKPOINTS, REQUESTS, RUNS, SAMPLERS, SESSIONS, Result, Store
from actors.serve.training import ADAPTER, Call, Job, Run, Training
from actors.serve.wire import read_object, read_text, read_whole
from rl_backend.contracts import BatchError, CheckpointError, ConfigError, UnsupportedError

logger = logging.getLogger(__name__)
request_log = logging.getLogger(f"{__name__}.requests")
"""A JSON object of every request that was answered through its future."""

EXTERNAL = "external_weights"
KINDS = {"weights": "training", "sampler_weights": "sampler", EXTERNAL: "external"}
_SAVES = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler", EXTERNAL: "save_weights_external"}
_KNOWN = {SESSIONS: "session", RUNS: "model", SAMPLERS: "sampler", REQUESTS: "request"}
_NAME = re.compile(r"[\w][\w.-]{0,199}")
_SWEEP_SECONDS = 10.0
_SPEED_SECONDS = 60.0
_KEYS_SECONDS = 1.0
_WRITE_SECONDS = 60.0
_MOST_METADATA = 16 << 10
_LONGEST_LIFE = 10 * 366 * 86400.0
_RECORD = 1024
"""Bytes that a request holds at least while it waits, about."""


class UnknownError(Exception):
    """Something that is not there, or is another's: 404."""


class BusyError(Exception):
    """More than the server takes at one time: 429, and the client asks again."""


@dataclass(frozen=True)
class Limits:
    """Attributes:
    session_timeout: seconds without a heartbeat after which a session ends and its runs free their places.
    keep_results: seconds for which an answer can be fetched again.
    snapshots: unnamed ones that a run keeps.
    open_samples: responses being sampled, of all clients together; more are answered 429.
    waiting_bytes: of training requests that wait; more are answered 429, unless they are next in their run's order.
    disk_bytes: that one key's checkpoints and snapshots take; None for any.
    free_bytes: of the disk, which are left for the database; saves fail first.
    requests_per_second: of one key, and ten times as many at one moment; more are answered 429. None for any.
    """

    session_timeout: float = 300.0
    keep_results: float = 3600.0
    snapshots: int = 32
    open_samples: int = 4096
    waiting_bytes: int = 1 << 30
    disk_bytes: int | None = None
    free_bytes: int = 1 << 30
    requests_per_second: float | None = None


class Rates:
    """How many requests each key may send: a bucket that fills up at ``per_second``, up to ten seconds' worth."""

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, owner: str) -> float:
        """Takes one; seconds until there is one, and 0 where there was."""
        if self._per_second is None:
            return 0.0
        now, most = time.monotonic(), max(1.0, 10 * self._per_second)
        left, since = self._left.get(owner, (most, now))
        left = min(most, left + (now - since) * self._per_second)
        self._left[owner] = (left - (left >= 1), now)
        return 0.0 if left >= 1 else (1 - left) / self._per_second


class Snapshot(NamedTuple):
    """Unnamed weights of a run, for samplers."""

    made: float
    folder: Path


class Futures:
    """Requests that are answered later, from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.errors = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[Result | None]] = {}

    def finish(self, answers: Mapping[str, Result]) -> None:
        """Answers requests, by their ids, for good."""
        kept = self._keep(answers)
        for request_id, found in kept.items():
            result = answers[request_id]
            self.errors += result.is_error
            said = {"error": result.body.decode()[:500]} if result.is_error else {}
            seconds = round(time.time() - found.pop("created"), 3)
            request_log.info(json.dumps({"request": request_id, **found, "seconds": seconds, **said}))
        loop = self._loop
        if loop is not None and not loop.is_closed():
            of_scopes: dict[str, Result | None] = dict.fromkeys(found["scope"] for found in kept.values())
            loop.call_soon_threadsafe(self._wake, of_scopes | {each: answers[each] for each in kept})

    def _keep(self, answers: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
        """Tries for a minute: a database that is locked, or a disk that is full, must not end training for all."""
        last = time.monotonic() + _WRITE_SECONDS
        while True:
            try:
                return self._store.finish(answers)
            except OperationalError as error:
                if time.monotonic() > last:
                    raise
                logger.warning("answers could not be written, and are tried again: %s", error.orig)
                time.sleep(1.0)

    async def result(self, request_id: str, owner: str, seconds: float) -> Result | None:
        """The answer; None where there is none within that time.

        Raises:
            UnknownError: no such request of this owner.
        """
        answer = self._next(request_id)
        # Looked up after it is waited for: an answer that comes in between is not missed.
        found = self._store.get(REQUESTS, id=request_id, owner=owner)
        if found is None:
            self._waiting.pop(request_id, None)
            raise UnknownError(f"request {request_id!r} is not known, or was answered longer than --keep-results ago")
        if found["finished"] is not None:
            self._waiting.pop(request_id, None)
            return Result(found["media"], found["body"])
        await asyncio.wait([answer], timeout=seconds)
        return answer.result() if answer.done() else None

    async def completed(self, sampler: str, client: int, after: int, seconds: float) -> list[dict[str, Any]]:
        """Requests of one client of a sampler that were answered since, in that order; empty after that time."""
        answer = self._next(sampler)
        found = self._store.completed(sampler, client, after)
        if not found and seconds > 0:
            await asyncio.wait([answer], timeout=seconds)
            found = self._store.completed(sampler, client, after)
        return found

    def _next(self, waited_for: str) -> asyncio.Future[Result | None]:
        """The answer of a request, or None at the next one of a sampler; whoever waits for the same has the same."""
        self._loop = asyncio.get_running_loop()
        return self._waiting.setdefault(waited_for, self._loop.create_future())

    def _wake(self, answers: Mapping[str, Result | None]) -> None:
        for each, result in answers.items():
            if (answer := self._waiting.pop(each, None)) is not None:
                answer.set_result(result)


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A base model: its runs, on ``training``, and its samplers, on ``sampling``.

    Attributes:
        name: which clients ask for.
        folder: its Hugging Face directory.
        longest: tokens of prompt and response, or of a datum.
    """

    name: str
    folder: Path
    longest: int
    training: Training
    sampling: Sampling

    @property
    def tokens(self) -> Mapping[str, int]:
        """Trained and sampled until now."""
        return {"trained": self.training.tokens, "sampled": self.sampling.tokens}

    def scorer(self, folder: Path | None, asked: Mapping[str, Any] | None) -> Score:
        """Computes log-probs of texts by the adapter of a folder, which was asked for so; of None by the base."""
        lora = None if asked is None else self.training.config_of(asked)

        async def score(scoring: Scoring) -> Scores:
            if len(scoring.tokens) > self.longest:
                raise BatchError(f"a text of {len(scoring.tokens)} tokens; log-probs are computed up to {self.longest}")
            return await asyncio.wrap_future(self.training.read_log_probs(folder, lora, scoring))

        return score


class Server:
    """Sessions, runs, checkpoints and samplers of clients, over one or several base models.

    Attributes:
        models: by their names.
    """

    def __init__(self, store: Store, futures: Futures, models: Iterable[ServedModel], limits: Limits) -> None:
        self.store, self.futures, self.limits = store, futures, limits
        self.models = {model.name: model for model in models}
        self.started = time.time()
        self.rates = Rates(limits.requests_per_second)
        self._needs_keys, self._look_for_keys = False, 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._snapshots: dict[str, deque[Snapshot]] = {}
        self._open_samples = 0
        self._links = Links()
        # When, and what was trained and sampled until then, by model.
        self._counts: deque[tuple[float, Mapping[str, Mapping[str, int]]]] = deque()
        self._count(self.started)

    def _count(self, now: float) -> None:
        self._counts.append((now, {name: model.tokens for name, model in self.models.items()}))
        while self._counts[0][0] < now - _SPEED_SECONDS:
            self._counts.popleft()

    def speeds(self, model: ServedModel) -> Mapping[str, float]:
        """Tokens of a model that were trained and sampled a second, in the last minute."""
        since, before = self._counts[0]
        seconds = max(time.time() - since, 1.0)
        return {kind: (count - before[model.name][kind]) / seconds for kind, count in model.tokens.items()}

    @property
    def needs_keys(self) -> bool:
        """Whether requests need a key, as it was within the last second: to look takes longer than most of them do."""
        if not self._needs_keys and (now := time.monotonic()) > self._look_for_keys:
            self._needs_keys, self._look_for_keys = self.store.has_keys, now + _KEYS_SECONDS
        return self._needs_keys

    @property
    def failed(self) -> str:
        """The models whose training has ended, and why; empty while all train."""
        return "; ".join(f"{name}: {why}" for name, model in self.models.items() if (why := model.training.failed))

    def model(self, name: Any) -> ServedModel:
        """Raises :class:`UnknownError` for a base model that is not served here."""
        if not isinstance(name, str) or name not in self.models:
            raise UnknownError(self._not_served(name))
        return self.models[name]

    def _not_served(self, name: Any) -> str:
        return f"base_model={name!r}: this server has {', '.join(map(repr, self.models))}"

    def known(self, table: Table, owner: str, name: str) -> dict[str, Any]:
        """A session, run, sampler or request.

        Raises:
            UnknownError: it is not there, or is another key's.
        """
        found = self.store.get(table, id=name, owner=owner)
        if found is None:
            raise UnknownError(f"{_KNOWN[table]} {name!r} is not known")
        return found

    # Sessions.

    def create_session(self, owner: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        session, now = str(uuid.uuid4()), time.time()
        kept = {key: asked.get(key) for key in ("tags", "sdk_version", "display_name")}
        kept["user_metadata"] = metadata_in(asked)
        self.store.add(SESSIONS, id=session, owner=owner, created=now, seen=now, ended=False, asked=kept)
        return {"type": "create_session", "session_id": session}

    def beat(self, owner: str, session: str) -> bool:
        """Keeps a session alive; False where it has ended."""
        found = self.store.get(SESSIONS, id=session, owner=owner)
        if found is None or found["ended"]:
            return False
        self.store.change(SESSIONS, {"seen": time.time()}, id=session)
        return True

    def require_session(self, owner: str, session: str) -> None:
        if self.known(SESSIONS, owner, session)["ended"]:
            # A client that was only slow goes on, and its old runs say that they are over.
            self.store.change(SESSIONS, {"ended": False, "seen": time.time()}, id=session)

    async def end_session(self, session: str, why: str) -> None:
        """Frees what a session has on ranks and engines; named checkpoints stay."""
        self.store.change(SESSIONS, {"ended": True}, id=session)
        for run in self.store.rows(RUNS, session=session, over=""):
            self.store.change(RUNS, {"over": why}, id=run["id"])
            self.models[run["base_model"]].training.end(run["id"], why)
            self._snapshots.pop(run["id"], None)
        kept = {checkpoint["folder"] for checkpoint in self.store.rows(CHECKPOINTS)}
        for sampler in self.store.rows(SAMPLERS, session=session):
            folder = sampler["folder"]
            if folder and folder not in kept and not (sampler["path"] and self._has_sampler(folder)):
                await self._delete(Path(folder))

    async def sweep(self) -> None:
        """For as long as the server lives: ends sessions that are silent, and forgets old results."""
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self.limits.session_timeout / 4))
            try:
                await self._sweep_once()
            except Exception:
                logger.exception("sweeping failed, and is tried again")

    async def _sweep_once(self) -> None:
        now = time.time()
        self._count(now)
        for session in self.store.rows(SESSIONS, ended=False):
            if session["seen"] < now - self.limits.session_timeout:
                silent = f"the session sent no heartbeat for {self.limits.session_timeout:g} s and has ended"
                await self.end_session(session["id"], f"{silent}; create a run from a checkpoint")
        for checkpoint in self.store.rows(CHECKPOINTS):
            if checkpoint["expires"] is not None and checkpoint["expires"] < now:
                self._delete_checkpoint(checkpoint)
        self.store.forget(now - self.limits.keep_results)

    # Runs.

    def create_model(self, owner: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        lora = {"seed": None, **read_object(asked, "lora_config")}
        lora["seed"] = secrets.randbits(31) if lora["seed"] is None else lora["seed"]

        def make(run: Run) -> Mapping[str, Any]:
            _require_adam(asked)
            self._of(run)[0].training.make(run, lora)
            return {"type": "create_model", "model_id": run.id}

        return self._new_run(owner, asked, read_text(asked, "base_model"), lora, make)

    def load_as_new(self, owner: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Creation by loading: rank and targets are the checkpoint's."""
        found = self._find(owner, read_text(asked, "path"), "weights")
        # Any model can say that a checkpoint is not there.
        its: Mapping[str, Any] = found or {"base_model": next(iter(self.models)), "lora": {}}
        base = read_text(asked, "base_model") if asked.get("base_model") else its["base_model"]

        def make(run: Run) -> Mapping[str, Any]:
            _require_adam(asked)
            return self._load(run, asked, found)

        return self._new_run(owner, asked, base, its["lora"], make)

    def _new_run(
        self,
        owner: str,
        asked: Mapping[str, Any],
        base: str,
        lora: Mapping[str, Any],
        make: Callable[[Run], Mapping[str, Any]],
    ) -> Mapping[str, Any]:
        session, metadata = read_text(asked, "session_id"), metadata_in(asked)
        self.require_session(owner, session)
        # Not free: the SDK derives it when it creates by loading.
        run, now = f"{session}:train:{read_whole(asked, 'model_seq_id')}", time.time()
        request_id, is_new = self.store.accept(run, 0, owner)
        if not is_new:
            return {"request_id": request_id, "model_id": run}
        problem = "" if base in self.models else self._not_served(base)
        added = self.store.add(
            RUNS,
            id=run,
            session=session,
            owner=owner,
            base_model=base,
            lora=dict(lora),
            created=now,
            last_request=now,
            over=problem,
            failed=bool(problem),
            user_metadata=metadata,
        )
        if added and not problem:
            self.models[base].training.create(run, request_id, partial(self._made, make))
        else:
            problem = problem or f"{run} was created before; its answer is not kept any more"
            self.futures.finish({request_id: Result.failed(problem)})
        return {"request_id": request_id, "model_id": run}

    def _made(self, make: Callable[[Run], Mapping[str, Any]], run: Run) -> Mapping[str, Any]:
        try:
            return make(run)
        except Exception as error:
            self.store.change(RUNS, {"over": f"the run could not be created: {error}", "failed": True}, id=run.id)
            raise

    def runs(self, **where: Any) -> list[dict[str, Any]]:
        """As lists show them: those that could be created, in the order of creation."""
        return [run for run in self.store.rows(RUNS, **where) if not run["failed"]]

    def submit(self, owner: str, run: str, seq_id: int, job: Job) -> Mapping[str, Any]:
        """Accepts a request of a run, whatever is in it: an answer of 4xx would lose its number, and all that follow wait.

        Raises:
            BusyError: the client sends the request again.
        """
        found = self.known(RUNS, owner, run)
        if seq_id < 1:
            raise BatchError(f"seq_id={seq_id}: the numbers of a run's requests begin at 1")
        training = None if found["over"] else self.models[found["base_model"]].training
        if training is not None and job.size and not training.is_next(run, seq_id):
            waits = sum(model.training.waiting_bytes for model in self.models.values())
            if waits + job.size > self.limits.waiting_bytes:
                raise BusyError("as many training requests wait as the server holds; ask again")
        request_id, is_new = self.store.accept(run, seq_id, owner)
        if is_new and training is None:
            self.futures.finish({request_id: Result.failed(found["over"], "server")})
        elif is_new and training is not None:
            training.submit(run, seq_id, request_id, job)
        return {"request_id": request_id, "model_id": run}

    def call(self, owner: str, asked: Mapping[str, Any], work: Callable[[Run], Mapping[str, Any]]) -> Mapping[str, Any]:
        run, seq_id = read_text(asked, "model_id"), read_whole(asked, "seq_id")
        return self.submit(owner, run, seq_id, Call(work, held_by(asked)))

    # Checkpoints.

    def save(self, owner: str, asked: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        """Saves a checkpoint of a name."""

        def work(run: Run) -> Mapping[str, Any]:
            name = read_text(asked, "path")
            if not _NAME.fullmatch(name):
                expected = "a name has up to 200 letters, digits, '_', '-' and '.'"
                raise ConfigError(f"path={name[:200]!r}: {expected}")
            expires, metadata = expiry(asked), metadata_in(asked)
            known = self.store.get(CHECKPOINTS, run=run.id, kind=kind, name=name)
            if known is not None and not asked.get("overwrite"):
                raise CheckpointError(f"tinker://{run.id}/{kind}/{name} exists; choose another name, or overwrite it")
            recipients = recipients_in(asked) if kind == EXTERNAL else ()
            folder, size = self._write(run, owner, "checkpoints", state=kind == "weights", recipients=recipients)
            row = self._of(run)[1]
            self.store.put(
                CHECKPOINTS,
                run=run.id,
                kind=kind,
                name=name,
                owner=owner,
                folder=str(folder),
                base_model=row["base_model"],
                lora=row["lora"],
                created=time.time(),
                bytes=size,
                user_metadata=metadata,
                expires=expires,
                public=False,
            )
            if known is not None:
                self._delete_checkpoint(known)
            return {"type": _SAVES[kind], "path": f"tinker://{run.id}/{kind}/{name}"}

        return self.call(owner, asked, work)

    def snapshot(self, owner: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """A sampler with the present weights, which it keeps while training goes on."""
        loop = asyncio.get_running_loop()

        def work(run: Run) -> Mapping[str, Any]:
            session = run.id.partition(":")[0]
            sampler = f"{session}:sample:{read_whole(asked, 'sampling_session_seq_id')}"
            if self.store.get(SAMPLERS, id=sampler) is not None:
                raise CheckpointError(f"sampler {sampler!r} exists; choose another sampling_session_seq_id")
            folder, size = self._write(run, owner, "snapshots", state=False)
            row = self._of(run)[1]
            weights = {"base_model": row["base_model"], "folder": str(folder), "lora": row["lora"], "bytes": size}
            self.store.add(SAMPLERS, id=sampler, session=session, owner=owner, **weights)
            kept = self._snapshots.setdefault(run.id, deque())
            kept.append(Snapshot(time.time(), folder))
            if len(kept) > self.limits.snapshots:
                asyncio.run_coroutine_threadsafe(self._delete(kept.popleft().folder), loop)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}

        return self.call(owner, asked, work)

    def _write(self, run: Run, owner: str, part: str, *, state: bool, recipients: Sequence[str] = ()) -> tuple[Path, int]:
        """Writes a run's weights to a new folder, readable for the ``recipients`` alone if there are any; its bytes too.

        Raises:
            CheckpointError: the key has as much on the disk as it may, or the disk is full.
        """
        folder, most = self.store.folder.resolve() / part / uuid.uuid4().hex, self.limits.disk_bytes
        free, used = shutil.disk_usage(self.store.folder).free, self.used_bytes(owner)
        if free < self.limits.free_bytes:
            raise CheckpointError(f"the server's disk has {free >> 20} MiB left; delete checkpoints, or ask its operator")
        self._of(run)[0].training.save(run, folder, state=state)
        try:
            encrypt(folder / ADAPTER, recipients)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            if most is not None and used + size > most:
                problem = f"{size} bytes beside the {used} that this key has on the disk, more than {most}"
                raise CheckpointError(f"{problem}; delete checkpoints")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder, size

    def used_bytes(self, owner: str) -> int:
        """Of a key's checkpoints and snapshots."""
        snapshots = [row for row in self.store.rows(SAMPLERS, owner=owner) if row["bytes"] and Path(row["folder"]).is_dir()]
        return int(sum(row["bytes"] for row in (*self.store.rows(CHECKPOINTS, owner=owner), *snapshots)))

    def newest_snapshot(self, run: str) -> Snapshot | None:
        """A run's last unnamed snapshot; None where this server has made none."""
        kept = self._snapshots.get(run)
        return kept[-1] if kept else None

    def load(self, owner: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        def work(run: Run) -> Mapping[str, Any]:
            return self._load(run, asked, self._find(owner, read_text(asked, "path"), "weights"))

        return self.call(owner, asked, work)

    def find(self, owner: str, path: str, *, own: bool = False) -> dict[str, Any]:
        """A checkpoint that a key may read, with ``own`` one that it has made."""
        found = self._find(owner, path)
        if found is None or (own and found["owner"] != owner):
            raise UnknownError(f"checkpoint {path!r} is not known")
        return found

    def find_adapter(self, owner: str, path: str) -> dict[str, Any]:
        """A checkpoint that can be sampled from."""
        found = self.find(owner, path)
        self.model(found["base_model"])
        if found["kind"] == EXTERNAL:
            raise UnknownError(f"{path} is for downloads; save the run with save_weights_for_sampler to sample from it")
        return found

    def links(self, owner: str, path: str) -> tuple[Mapping[str, str], float]:
        """Of external weights, each file's name with the end of an address that needs no key; and when they expire."""
        return self._links.make(Path(self.find(owner, path)["folder"]) / ADAPTER)

    def linked(self, token: str, name: str) -> Path:
        """The file at such an address.

        Raises:
            UnknownError: no such address, or none any more.
        """
        if (found := self._links.find(token, name)) is None:
            raise UnknownError("no such file, or its address has expired; ask for new ones")
        return found

    def keep_checkpoint(self, owner: str, path: str, asked: Mapping[str, Any]) -> None:
        """Gives a checkpoint another lifetime, or none."""
        self._change(self.find(owner, path, own=True), expires=expiry(asked))

    def publish(self, owner: str, path: str, *, public: bool) -> None:
        """Lets other keys read a checkpoint, or no more. What they have made of it stays theirs."""
        self._change(self.find(owner, path, own=True), public=public)

    def _change(self, found: Mapping[str, Any], **values: Any) -> None:
        self.store.change(CHECKPOINTS, values, run=found["run"], kind=found["kind"], name=found["name"])

    def remove_checkpoint(self, owner: str, run: str, kind: str, name: str) -> None:
        self._delete_checkpoint(self.find(owner, f"tinker://{run}/{kind}/{name}", own=True))

    def checkpoints(self, owner: str, run: str | None = None) -> list[dict[str, Any]]:
        """As the API lists them, the newest first."""
        rows = self.store.rows(CHECKPOINTS, owner=owner, **({} if run is None else {"run": run}))
        return [shown_checkpoint(row) for row in sorted(rows, key=lambda row: -row["created"])]

    def _find(self, owner: str, path: str, kind: str | None = None) -> dict[str, Any] | None:
        parts = str(path).removeprefix("tinker://").split("/")
        if not str(path).startswith("tinker://") or len(parts) != 3 or (kind is not None and parts[1] != kind):
            return None
        found = self.store.get(CHECKPOINTS, run=parts[0], kind=parts[1], name=parts[2])
        return found if found is not None and (found["owner"] == owner or found["public"]) else None

    def _load(self, run: Run, asked: Mapping[str, Any], found: Mapping[str, Any] | None) -> Mapping[str, Any]:
        path = asked["path"]
        if found is None:
            raise CheckpointError(f"path={path!r} is no training checkpoint that this key may read; see list_checkpoints")
        model = self._of(run)[0]
        if found["base_model"] != model.name:
            raise CheckpointError(f"{path} is of {found['base_model']!r}, and the run of {model.name!r}")
        model.training.load(run, Path(found["folder"]), found["lora"], optimizer=bool(asked.get("optimizer")))
        self.store.change(RUNS, {"lora": found["lora"]}, id=run.id)
        return {"type": "load_weights", "path": path, "model_id": run.id}

    def _delete_checkpoint(self, found: Mapping[str, Any]) -> None:
        key = {"run": found["run"], "kind": found["kind"], "name": found["name"], "folder": found["folder"]}
        self.store.delete(CHECKPOINTS, **key)
        # A sampler that has these weights goes on with them.
        if not self._has_sampler(found["folder"]):
            # New ranks would look for what ranks compute log-probs with.
            for model in self.models.values():
                model.training.forget(Path(found["folder"]) / ADAPTER)
            shutil.rmtree(found["folder"], ignore_errors=True)

    def _has_sampler(self, folder: str) -> bool:
        """Of a session that lives."""
        sessions = {sampler["session"] for sampler in self.store.rows(SAMPLERS, folder=folder)}
        return any(not found["ended"] for each in sessions for found in self.store.rows(SESSIONS, id=each))

    async def _delete(self, folder: Path) -> None:
        for model in self.models.values():
            model.training.forget(folder / ADAPTER)
            await model.sampling.forget(folder / ADAPTER)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _of(self, run: Run) -> tuple[ServedModel, dict[str, Any]]:
        """The model and the row of a run that works."""
        found = self.store.get(RUNS, id=run.id)
        assert found is not None, "a run that works is there"
        return self.models[found["base_model"]], found

    # Samplers.

    def create_sampler(self, owner: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        session = read_text(asked, "session_id")
        self.require_session(owner, session)
        sampler = f"{session}:sample:{read_whole(asked, 'sampling_session_seq_id')}"
        path, base = asked.get("model_path"), asked.get("base_model")
        weights: Mapping[str, Any]
        if path:
            weights = self.find_adapter(owner, path)
            if base and base != weights["base_model"]:
                raise BatchError(f"base_model={base!r}: {path} is of {weights['base_model']!r}; leave base_model out")
        else:
            weights = {"base_model": self.model(base).name, "folder": None, "lora": None}
        given = {name: weights[name] for name in ("base_model", "folder", "lora")}
        self.store.add(SAMPLERS, id=sampler, session=session, owner=owner, path=path or None, **given)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def sample(self, owner: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accepts a request for samples.

        Raises:
            UnknownError: the sampler, or its model.
            BusyError: as many are open as the server takes.
        """
        sampler = self.known(SAMPLERS, owner, read_text(asked, "sampling_session_id"))
        model = self.model(sampler["base_model"])
        count = read_whole({"num_samples": 1, **asked}, "num_samples", 1, self.limits.open_samples)
        self.require_places(count)
        seq_id = secrets.randbits(62) if asked.get("seq_id") is None else read_whole(asked, "seq_id")
        request_id, is_new = self.store.accept(sampler["id"], seq_id, owner)
        if is_new:
            task = asyncio.get_running_loop().create_task(self._sample(request_id, asked, model, sampler))
            self._tasks[request_id] = task
            self._open_samples += count
            # Not in the task: one that is cancelled before it begins never runs.
            task.add_done_callback(lambda _: self._give_back(count))
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}/{index}" for index in range(count)]}

    def require_places(self, count: int) -> None:
        """Raises :class:`BusyError` where so many samples more are too many. Those that wait for an engine count too."""
        if self._open_samples and self._open_samples + count > self.limits.open_samples:
            raise BusyError(f"{self._open_samples} samples are open; ask again")

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Inside, so many samples more are open."""
        self._open_samples += count
        try:
            yield
        finally:
            self._give_back(count)

    def _give_back(self, count: int) -> None:
        self._open_samples -= count

    def cancel(self, owner: str, request_id: str) -> None:
        """Ends a request for samples, which fails; one that is answered, or is no such request, stays as it is.

        Raises:
            UnknownError: no request of this owner.
        """
        self.known(REQUESTS, owner, request_id)
        if (task := self._tasks.pop(request_id, None)) is not None:
            self.futures.finish({request_id: Result.failed("the request was cancelled by its client")})
            task.cancel()

    def join(self, owner: str, sampler: str) -> int:
        """A number for another client of a sampler, whose requests begin at so many times 10^9; the first has 0."""
        self.known(SAMPLERS, owner, sampler)
        return self.store.count_client(sampler)

    def folder_of(self, sampler: Mapping[str, Any]) -> Path | None:
        """Of a sampler's adapter; None for the base.

        Raises:
            CheckpointError: the adapter is gone.
        """
        if not sampler["folder"]:
            return None
        folder = Path(sampler["folder"]) / ADAPTER
        if not folder.is_dir():
            kept = f"a run keeps its last {self.limits.snapshots} unnamed snapshots, until its session ends"
            raise CheckpointError(f"sampler {sampler['id']!r}: its weights are gone; {kept}: save them with a name")
        return folder

    async def _sample(
        self, request_id: str, asked: Mapping[str, Any], model: ServedModel, sampler: Mapping[str, Any]
    ) -> None:
        try:
            folder = self.folder_of(sampler)
            result = Result.of(await model.sampling.answer(asked, folder, model.scorer(folder, sampler["lora"])))
        except Exception as error:  # noqa: BLE001 it is answered
            result = Result.of_error(error)
        finally:
            self._tasks.pop(request_id, None)
        self.futures.finish({request_id: result})


def _require_adam(asked: Mapping[str, Any]) -> None:
    kind = read_object(asked, "optimizer_config").get("type", "adamw")
    if kind not in ("adam", "adamw"):
        raise UnsupportedError(f"optimizer_config.type={kind!r} is not served here; use adamw")


def shown_checkpoint(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row['kind']}/{row['name']}",
        "checkpoint_type": KINDS[row["kind"]],
        "time": shown_time(row["created"]),
        "tinker_path": f"tinker://{row['run']}/{row['kind']}/{row['name']}",
        "size_bytes": row["bytes"],
        "public": bool(row["public"]),
        "user_metadata": row["user_metadata"],
        "expires_at": None if row["expires"] is None else shown_time(row["expires"]),
    }


def expiry(asked: Mapping[str, Any]) -> float | None:
    """When a checkpoint of a request's ``ttl_seconds`` is deleted; None where it stays."""
    seconds = asked.get("ttl_seconds")
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_LIFE:
        raise BatchError(f"ttl_seconds={seconds!r}: expected seconds, up to ten years, or nothing")
    return time.time() + seconds


def shown_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def held_by(asked: Mapping[str, Any]) -> int:
    """Bytes of a request that waits."""
    return _RECORD + len(json.dumps(asked))


def metadata_in(asked: Mapping[str, Any]) -> Any:
    """Raises :class:`BatchError` for more than 16 KiB."""
    found = asked.get("user_metadata")
    if (size := len(json.dumps(found))) > _MOST_METADATA:
        raise BatchError(f"user_metadata: {size} bytes; expected at most {_MOST_METADATA}")
    return found
