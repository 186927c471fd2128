"""Requests of a group of engines: each goes to one of them as it becomes free, and to another where that one is lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import ray
import xxhash

from actors.cluster import prometheus
from actors.cluster.ray_watch import ray_is_usable
from actors.rollout.group.calls import outcome_of
from actors.rollout.group.engines import EngineSet, engine_name
from actors.rollout.messages import Request, Response
from rl_backend.contracts import EngineDeadError, EngineDirtyError, RLBackendError, RolloutError

# How long an engine lets a call wait that asks for answers, where there are none.
ANSWER_SECONDS = 30.0
# A process that hangs does not say either how long it stands still.
HANGING_SECONDS = 10.0


class EngineTurns:
    """The turns of one engine's process, from the first to its end. ``lose`` is told of the error by which the engine is
    lost.
    """

    def __init__(self, name: str, actor: Any, limit: float, lose: Callable[[RLBackendError], None]) -> None:
        self._name = name
        self.actor = actor
        # Turns and answers pass pushes; see CONCURRENCY_GROUPS of the engine.
        self._start_turns = actor.start_turns.options(concurrency_group="turns")
        self._give_up_turns = actor.give_up_turns.options(concurrency_group="turns")
        self._seconds_without_progress = actor.seconds_without_progress.options(concurrency_group="turns")
        self._take_turns = actor.take_turns.options(concurrency_group="answers")
        # Seconds that the engine serves and ends no request, after which it counts as dead. They do not run while it sleeps,
        # or waits for the end of a push.
        self._limit = limit
        self._lose = lose
        self._keys = itertools.count()
        self._changed = threading.Condition()
        self._asked: dict[int, tuple[Request, Future[Response]]] = {}
        # time.monotonic() when the engine is known to have ended a request, or to have had none of these turns.
        self._progress = 0.0
        self._ended: RLBackendError | None = None
        self._thread = threading.Thread(target=self._wait_for_answers, name=f"turns of {name}", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        return len(self._asked)

    def ask(self, requests: Sequence[Request]) -> list[Future[Response]]:
        """Asks for turns, which begin together. Cancelling a future gives its turn up."""
        asked: dict[int, tuple[Request, Future[Response]]] = {next(self._keys): (request, Future()) for request in requests}
        futures = [future for _, future in asked.values()]
        with self._changed:
            if self._ended is not None:
                for future in futures:
                    future.set_exception(self._ended)
                return futures
            if not self._asked:
                self._progress = time.monotonic()
            self._asked |= asked
            self._changed.notify()
        for key, (_, future) in asked.items():
            future.add_done_callback(partial(self._give_up_cancelled, key))
        self._start_turns.remote([(key, request) for key, (request, _) in asked.items()])
        self._tell_queue()
        return futures

    def give_up(self) -> None:
        """Ends turns of episodes: what calls have asked for is sampled to its end."""
        with self._changed:
            keys = [key for key, (request, _) in self._asked.items() if request.waits]
        self._give_up_turns.remote(keys)

    def end(self, error: RLBackendError) -> None:
        with self._changed:
            self._ended = self._ended or error
            asked, self._asked = self._asked, {}
            self._changed.notify()
        for _, future in asked.values():
            _set(future, error)

    def _give_up_cancelled(self, key: int, future: Future[Response]) -> None:
        if future.cancelled() and self._ended is None:
            self._give_up_turns.remote([key])

    def _wait_for_answers(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._ended is not None)
                if self._ended is not None:
                    return
            try:
                answers = self._next_answers()
            except RLBackendError as error:
                if self._ended is None:
                    self._lose(error)
                self.end(error)
                return
            except Exception as error:  # noqa: BLE001 Ray raises errors of any type while it shuts down
                self.end(RolloutError(f"{self._name} cannot be asked any more: {type(error).__name__}: {error}"))
                return
            self._take(answers)

    def _next_answers(self) -> Iterable[tuple[int, Response | RLBackendError]]:
        reference = self._take_turns.remote(ANSWER_SECONDS)
        while not ray.wait([reference], timeout=self._seconds_left())[0]:
            if self._ended is not None:
                return ()
            if not ray_is_usable():
                raise RolloutError(f"{self._name} cannot be asked any more: Ray has been shut down", engine=self._name)
            if self._seconds_left() <= 0 and not self._makes_progress():
                raise EngineDeadError(
                    f"{self._name} has answered no request for {self._limit:g} s (RolloutConfig.sampling_timeout): its "
                    "process hangs and is ended; restart it, or raise the limit if its responses may take longer",
                    engine=self._name,
                    sampling_timeout=self._limit,
                )
        answers: Iterable[tuple[int, Response | RLBackendError]] = self._result(reference)
        return answers

    def _seconds_left(self) -> float:
        with self._changed:
            return min(max(self._progress + self._limit - time.monotonic(), 0.0), ANSWER_SECONDS)

    def _makes_progress(self) -> bool:
        # The engine is asked: it knows whether it serves, and what it does for others.
        reference = self._seconds_without_progress.remote()
        if not ray.wait([reference], timeout=HANGING_SECONDS)[0]:
            return False
        seconds = self._result(reference)
        with self._changed:
            self._progress = max(self._progress, time.monotonic() - seconds)
        return self._seconds_left() > 0

    def _result(self, reference: Any) -> Any:
        outcome = outcome_of(reference, self._name)
        if isinstance(outcome, RLBackendError):
            raise outcome
        return outcome

    def _take(self, answers: Iterable[tuple[int, Response | RLBackendError]]) -> None:
        for key, answer in answers:
            with self._changed:
                _, future = self._asked.pop(key, (None, None))
                self._progress = time.monotonic()
            if isinstance(answer, EngineDeadError | EngineDirtyError):
                self._lose(answer)
            if future is not None:
                _set(future, answer)
        self._tell_queue()

    def _tell_queue(self) -> None:
        prometheus.set_gauge("rl_backend_rollout_queue", self.in_flight, engine=self._name.removeprefix("engine "))


@dataclass(eq=False)
class _Turn:
    request: Request
    # The engine that has what its prompt begins with in its cache.
    home: int | None
    answer: Future[Response] = field(default_factory=Future)
    # Of the engine that has it.
    asked: Future[Response] | None = None
    # time.monotonic() since when it has waited, and why the engine that had it was lost.
    since: float = field(default_factory=time.monotonic)
    lost: RLBackendError | None = None

    def give_up_cancelled(self, answer: Future[Response]) -> None:
        if answer.cancelled() and self.asked is not None:
            self.asked.cancel()


class GroupTurns:
    """The turns of a group of engines. Whatever samples asks here: calls for prompts, and episodes turn by turn."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._turns: dict[int, EngineTurns] = {}
        self._router = PrefixRouter()
        # Those of a list go to one engine. Changes with the engines: the thread that sends them waits for both.
        self._waiting: deque[list[_Turn]] = deque()
        self._ended: RLBackendError | None = None
        self._thread: threading.Thread | None = None

    @property
    def in_flight(self) -> dict[int, int]:
        """Turns of each engine that serves."""
        turns = dict(self._turns)
        return {engine: turns[engine].in_flight if engine in turns else 0 for engine in self._engines.engines}

    def ask(self, groups: Sequence[Sequence[Request]]) -> list[list[Future[Response]]]:
        """Asks for responses. Cancelling a future gives its turn up.

        Each group goes to one engine: a turn to that with most of its prompt in its cache, anything else in order to the
        least busy one, as soon as it runs fewer requests than it has room for. When an engine dies or is dirty, its turns
        are asked again of another, or of the one that replaces it; those of calls (``waits=False``) only where engines are
        replaced.

        Raises:
            EngineDeadError, EngineDirtyError: no engine is left, or one was lost too often. As an answer too.
            RolloutError: no engine has weights, or the group is closed.
        """
        self._engines.require_hope()
        if self._ended is not None:
            raise self._ended
        if not self._engines.heals:
            self._engines.living()
        asked = [[_Turn(request, self._home(request)) for request in group] for group in groups]
        with self._engines.moved:
            if self._ended is not None:  # meanwhile: nobody would answer
                raise self._ended
            for turn in itertools.chain.from_iterable(asked):
                if not turn.request.waits:
                    self._engines.asked.add(turn.answer)
                    turn.answer.add_done_callback(self._engines.asked.discard)
                turn.answer.add_done_callback(turn.give_up_cancelled)
            for group in asked:
                # They wait for no other: their engine takes them at once.
                (self._waiting.append if group[0].home is None else self._waiting.appendleft)(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="turns of engines", daemon=True)
                self._thread.start()
            self._engines.moved.notify_all()
        return [[turn.answer for turn in group] for group in asked]

    def give_up(self) -> None:
        """Ends every turn of an episode: each is answered with ``finish="abort"`` and what it had sampled."""
        with self._engines.moved:
            given_up = [group for group in self._waiting if group[0].request.waits]
            self._waiting = deque(group for group in self._waiting if not group[0].request.waits)
        for turn in itertools.chain.from_iterable(given_up):
            _set(turn.answer, Response([], [], "abort"))
        for turns in list(self._turns.values()):
            turns.give_up()

    def end(self, error: RLBackendError) -> None:
        with self._engines.moved:
            self._ended = self._ended or error
            waiting, self._waiting = self._waiting, deque()
            self._engines.moved.notify_all()
        for turn in itertools.chain.from_iterable(waiting):
            _set(turn.answer, error)
        for turns in list(self._turns.values()):
            turns.end(error)

    def _home(self, request: Request) -> int | None:
        # Prompts of calls have no turns before them.
        return self._router.find(request.prompt_ids, self._engines.engines) if request.waits else None

    def _serve(self) -> None:
        with self._engines.moved:
            while self._ended is None:
                sent = self._assigned()
                for engine, turns in sent.items():
                    self._send(engine, turns)
                if not sent:
                    self._engines.moved.wait(1.0 if self._waiting else None)

    def _assigned(self) -> dict[int, list[_Turn]]:
        """Takes the turns that engines have room for now out of those that wait."""
        if self._waiting:
            self._fail_hopeless()
        in_flight, infos = self.in_flight, self._engines.infos
        found: dict[int, list[_Turn]] = {}
        while self._waiting and in_flight:
            group = [turn for turn in self._waiting[0] if not turn.answer.cancelled()]
            home = group[0].home if group else None
            if home is not None and home in in_flight:
                engine = home
            else:
                engine = min(in_flight, key=lambda each: (in_flight[each], each))
                if in_flight[engine] >= infos[engine].room:
                    break
            self._waiting.popleft()
            in_flight[engine] += len(group)
            found.setdefault(engine, []).extend(group)
        return found

    def _fail_hopeless(self) -> None:
        """Those that no engine will answer."""
        given_up, engines = self._engines.given_up, self._engines
        if given_up is None and engines.engines:
            return
        waiting, self._waiting = self._waiting, deque()
        for group in waiting:
            if given_up is None and engines.comes(group[0].since):
                self._waiting.append(group)
                continue
            for turn in group:
                _set(turn.answer, given_up or turn.lost or engines.none_left())

    def _send(self, engine: int, turns: Sequence[_Turn]) -> None:
        try:
            asked = self._turns_of(engine).ask([turn.request for turn in turns])
        except EngineDeadError as error:  # at this moment
            for turn in turns:
                self._ask_again(turn, error)
            return
        except Exception as error:  # noqa: BLE001 Ray raises errors of any type while it shuts down
            for turn in turns:
                _set(turn.answer, RolloutError(f"{engine_name(engine)} cannot be asked: {type(error).__name__}: {error}"))
            return
        for turn, answer in zip(turns, asked, strict=True):
            turn.asked = answer
            turn.give_up_cancelled(turn.answer)
            answer.add_done_callback(partial(self._answered, turn))

    def _answered(self, turn: _Turn, asked: Future[Response]) -> None:
        if asked.cancelled():
            pass
        elif isinstance(error := asked.exception(), RLBackendError):
            lost = isinstance(error, EngineDeadError | EngineDirtyError)
            if lost and (turn.request.waits or self._engines.heals):
                self._ask_again(turn, error)
            else:
                _set(turn.answer, error)
        else:
            response = asked.result()
            if turn.request.waits:
                self._router.remember([*turn.request.prompt_ids, *response.token_ids], response.engine)
            _set(turn.answer, response)
        with self._engines.moved:
            self._engines.moved.notify_all()

    def _ask_again(self, turn: _Turn, error: RLBackendError) -> None:
        turn.lost, turn.since = error, time.monotonic()
        with self._engines.moved:
            if self._ended is None:
                self._waiting.appendleft([turn])
            else:
                _set(turn.answer, self._ended)

    def _turns_of(self, engine: int) -> EngineTurns:
        living = self._engines.living(required=False)
        if engine not in living:
            raise EngineDeadError(
                f"{engine_name(engine)} is lost: {self._engines.lost_engines.get(engine)}", engine=engine_name(engine)
            )
        actor = living[engine]
        # Turns belong to a process: one that was restarted has none of those before.
        turns = self._turns.get(engine)
        if turns is None or turns.actor is not actor:
            lose = partial(self._engines.note, engine, actor=actor)
            limit = self._engines.config.sampling_timeout
            turns = self._turns[engine] = EngineTurns(engine_name(engine), actor, limit, lose)
        return turns


def _set(future: Future[Response], answer: Response | RLBackendError) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, RLBackendError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class PrefixRouter:
    """Remembers the engines of ``most`` sequences; the oldest are forgotten."""

    def __init__(self, most: int = 65536) -> None:
        self._most = most
        self._engines: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._lock = threading.Lock()

    def remember(self, token_ids: Sequence[int], engine: int) -> None:
        """An engine has keys and values of the whole sequence."""
        key = len(token_ids), _digests(token_ids, [len(token_ids)])[0]
        with self._lock:
            if key not in self._engines:
                self._lengths[key[0]] += 1
            self._engines[key] = engine
            self._engines.move_to_end(key)
            if len(self._engines) > self._most:
                (length, _), _ = self._engines.popitem(last=False)
                self._lengths[length] -= 1
                self._lengths += Counter()  # drops lengths that none has

    def find(self, token_ids: Sequence[int], engines: Collection[int]) -> int | None:
        """The one of ``engines`` that has most of what a prompt begins with; None where none is known to have any."""
        with self._lock:
            lengths = sorted(length for length in self._lengths if length <= len(token_ids))
        # The longest first: what it has in its cache begins with all shorter ones.
        for key in reversed(list(zip(lengths, _digests(token_ids, lengths), strict=True))):
            with self._lock:
                engine = self._engines.get(key)
            if engine in engines:
                return engine
        return None


def _digests(token_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
    # Of each beginning of the sequence; lengths ascend, so that one pass over the tokens is enough.
    ids, digest, start, digests = np.asarray(token_ids, dtype=np.int64), xxhash.xxh3_64(), 0, []
    for length in lengths:
        digest.update(ids[start:length].tobytes())
        digests.append(int(digest.intdigest()))
        start = length
    return digests
