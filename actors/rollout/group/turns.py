"""Turns of episodes on a group of engines: each goes to one engine, while other calls sample on all."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray

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
        # Turns and answers pass calls that sample; see CONCURRENCY_GROUPS of the engine.
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
        self._asked: dict[int, Future[Response]] = {}
        # time.monotonic() when the engine is known to have ended a request, or to have had none of these turns.
        self._progress = 0.0
        self._ended: RLBackendError | None = None
        self._thread = threading.Thread(target=self._wait_for_answers, name=f"turns of {name}", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        return len(self._asked)

    def ask(self, request: Request) -> Future[Response]:
        """Asks for a turn. Cancelling the future gives the turn up."""
        future: Future[Response] = Future()
        key = next(self._keys)
        with self._changed:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            if not self._asked:
                self._progress = time.monotonic()
            self._asked[key] = future
            self._changed.notify()
        future.add_done_callback(partial(self._give_up_cancelled, key))
        self._start_turns.remote([(key, request)])
        return future

    def give_up(self) -> None:
        self._give_up_turns.remote(list(self._asked))

    def end(self, error: RLBackendError) -> None:
        with self._changed:
            self._ended = self._ended or error
            asked, self._asked = self._asked, {}
            self._changed.notify()
        for future in asked.values():
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
                    f"{self._name} has not answered a turn for {self._limit:g} s (RolloutConfig.sampling_timeout): its "
                    "process hangs and is ended; restart it, or raise the limit if its turns may take longer",
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
                future = self._asked.pop(key, None)
                self._progress = time.monotonic()
            if isinstance(answer, EngineDirtyError):
                self._lose(answer)
            if future is not None:
                _set(future, answer)


class GroupTurns:
    """The turns of a group of engines; :class:`~actors.rollout.tokens.RolloutTokens` asks for them."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._turns: dict[int, EngineTurns] = {}
        self._lock = threading.Lock()

    @property
    def asked_for(self) -> bool:
        return bool(self._turns)

    @property
    def in_flight(self) -> dict[int, int]:
        turns = dict(self._turns)
        return {engine: turns[engine].in_flight if engine in turns else 0 for engine in self._engines.engines}

    def ask(self, engine: int, request: Request) -> Future[Response]:
        """Asks an engine for a turn; cancelling the future gives it up. During a push of weights it begins after it."""
        return self._turns_of(engine).ask(request)

    def give_up(self) -> None:
        """Ends every turn in flight: each is answered with ``finish="abort"`` and what it had sampled."""
        for turns in list(self._turns.values()):
            turns.give_up()

    def end(self, error: RLBackendError) -> None:
        for turns in list(self._turns.values()):
            turns.end(error)

    def _turns_of(self, engine: int) -> EngineTurns:
        self._engines.require_hope()
        living = self._engines.living()
        if engine not in living:
            raise EngineDeadError(
                f"{engine_name(engine)} is lost: {self._engines.lost_engines.get(engine)}", engine=engine_name(engine)
            )
        actor = living[engine]
        with self._lock:
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
