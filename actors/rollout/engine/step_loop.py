"""An engine's step loop, which has its own thread: requests begin, end and are given up between two steps."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from actors.rollout.messages import AdapterVersion, Request, VersionSpan
from rl_backend.contracts import EngineDeadError


class Completion(NamedTuple):
    """What a request came to.

    Attributes:
        output: vLLM's ``CompletionOutput``; its ``finish_reason`` is ``abort`` where the request was given up. None
            where it was given up before it began.
        cached_tokens: of the prompt, which were not computed.
        spans: versions of the weights, or of the adapter, that sampled its tokens; the loop fills them in.
    """

    output: Any
    cached_tokens: int
    spans: tuple[VersionSpan, ...] = ()


@dataclass(slots=True)
class Stretch:
    """A time in which requests ran, one after the other or at once.

    Attributes:
        start, end: ``time.monotonic_ns()``.
        version: the newest that has sampled.
        responses: that have ended; the tokens are those of these.
    """

    start: int
    end: int
    version: int
    responses: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0


class Stepper(Protocol):
    """What runs requests step by step. Keys are the caller's."""

    @property
    def room(self) -> int:
        """Requests that run at one time."""

    def add(self, key: int, request: Request) -> None:
        """Begins a request; raises what is wrong with it, and is then as before."""

    def step(self) -> Iterable[tuple[int, Completion]]:
        """One more token of every request; those that have ended."""

    def give_up(self, key: int) -> Completion:
        """Ends a request; what there is of it."""

    def sampled(self, key: int) -> int:
        """Tokens that a request has sampled."""

    def forget(self) -> None:
        """Drops all keys and values. Requests keep their tokens, for which the next step computes keys and values anew."""


class Host(Protocol):
    """What knows which weights are served. Its methods are called on the loop's thread."""

    def admit(self, request: Request) -> bool:
        """Whether a request may begin now; raises where it never may."""

    def version_for(self, request: Request) -> int:
        """That its next token is sampled with."""

    def ended(self, request: Request) -> None:
        """A request has left, whatever came of it."""

    def sampled(self, stretch: Stretch) -> None:
        """Nothing runs any more, or what runs pauses."""

    def failed(self, error: Exception) -> Exception:
        """What to tell those who wait when a step has raised ``error``."""


@dataclass(slots=True, eq=False)
class _Entry:
    key: int
    request: Request
    result: Future[Completion]
    version: int = -1
    spans: list[VersionSpan] = field(default_factory=list)

    def note(self, sampled: int) -> None:
        # Tokens since the last note are of the present version.
        tokens = sampled - sum(span.tokens for span in self.spans)
        if tokens and self.spans and self.spans[-1].version == self.version:
            tokens += self.spans.pop().tokens
        if tokens:
            self.spans.append(VersionSpan(self.version, tokens))


class StepLoop:
    """Steps as long as there are requests. Whatever else touches the engine runs on the same thread, between two steps."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting: deque[_Entry] = deque()
        self._running: dict[int, _Entry] = {}
        self._hold: Future[None] | None = None
        self._closed_by: Exception | None = None
        self._failure: EngineDeadError | None = None
        self._progress = time.monotonic()
        self._stretch: Stretch | None = None

    def start(self, host: Host, make: Callable[[], Stepper]) -> None:
        """Starts the thread, which makes the stepper; raises what that raises."""
        self._host = host
        # One thread for all of vLLM: a kernel's threads belong to the thread that calls it, and vLLM binds them to cores
        # when it starts.
        self._thread = threading.Thread(target=self._run, name=f"{self._name} steps", daemon=True)
        self._thread.start()
        self._stepper = self.call(make)

    @property
    def room(self) -> int:
        """Requests that run at one time."""
        return self._stepper.room

    @property
    def seconds_without_progress(self) -> float:
        """Since a request has ended, or the last hold; 0 while requests wait for :meth:`release`. For any thread."""
        hold = self._hold
        return 0.0 if hold is not None and hold.done() else time.monotonic() - self._progress

    def check(self) -> None:
        """Raises EngineDeadError once an error of the loop itself has ended it: nobody would be answered any more."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends the thread, after the step that it is in; who waits for a request waits for ever."""
        if self._thread is not None:
            self._commands.put(None)
            self._thread.join()

    def call[T](self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self._thread is None or threading.current_thread() is self._thread:
            return function(*args, **kwargs)
        self.check()
        result: Future[T] = Future()
        self._commands.put(partial(_settle, result, partial(function, *args, **kwargs)))
        return result.result()

    def submit(self, requests: Sequence[Request]) -> dict[int, Future[Completion]]:
        """Asks for responses, by key, in the order in which they are to begin. Callbacks of the futures run in the
        loop's thread.
        """
        entries = [_Entry(next(self._keys), request, Future()) for request in requests]
        self._commands.put(partial(self._queue, entries))
        return {entry.key: entry.result for entry in entries}

    def give_up(self, keys: Iterable[int]) -> None:
        self._commands.put(partial(self._give_up, set(keys)))

    def hold(self) -> None:
        """Begins no request from now on, and returns when nothing runs, or only requests that can pause do, which then
        pause.
        """
        if self._thread is not None:
            self.call(self._begin_hold).result()

    def release(self) -> None:
        """After :meth:`hold`: requests begin and continue, with the version that the host names now."""
        self.call(self._release)

    def drop(self, error: Exception) -> None:
        self.call(lambda: self._fail(error, list(self._running.values())))

    def close(self, error: Exception) -> None:
        """Ends every request with an error, those to come too, until :meth:`release`."""
        self.call(self._close, error)

    def adapters(self, *, running: bool) -> set[AdapterVersion]:
        """Of the requests that run, or of all. On the loop's thread."""
        entries = self._running.values() if running else (*self._running.values(), *self._waiting)
        return {entry.request.adapter for entry in entries if entry.request.adapter is not None}

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            what = f"its step loop has ended by {type(error).__name__}: {error}"
            self._failure = EngineDeadError(f"{self._name} is dead: {what}; restart it", engine=self._name)
            raise

    def _work(self) -> None:
        while self._take_commands():
            self._begin()
            if self._may_step:
                self._step()
                self._begin()
            self._settle_hold()
            if self._stretch is not None and not self._may_step:
                stretch, self._stretch = self._stretch, None
                self._host.sampled(stretch)

    @property
    def _may_step(self) -> bool:
        return bool(self._running) and (self._hold is None or not self._hold.done())

    def _take_commands(self) -> bool:
        # Waits only where there is nothing else to do.
        wait = not self._may_step
        while True:
            try:
                command = self._commands.get(wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _queue(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            self._waiting.append(entry)
            if self._closed_by is not None:
                self._end(entry, self._closed_by)

    def _begin(self) -> None:
        if self._hold is not None:
            return
        adapters_wait = False
        for entry in list(self._waiting):
            if len(self._running) >= self._stepper.room:
                return
            # In order: an adapter for which there is no slot would else wait for as long as others are asked for.
            if adapters_wait and entry.request.adapter is not None:
                continue
            try:
                if not self._host.admit(entry.request):
                    adapters_wait = True
                    continue
                self._stepper.add(entry.key, entry.request)
            except Exception as error:  # noqa: BLE001 an error of one request affects only that request
                self._end(entry, error)
                continue
            self._waiting.remove(entry)
            self._running[entry.key] = entry
            entry.version = self._host.version_for(entry.request)

    def _step(self) -> None:
        if self._stretch is None:
            now = time.monotonic_ns()
            self._stretch = Stretch(now, now, max(entry.version for entry in self._running.values()))
        try:
            finished = list(self._stepper.step())
        except Exception as error:  # noqa: BLE001 vLLM raises errors of any type
            self._fail(self._host.failed(error))
            return
        for key, completion in finished:
            self._end(self._running[key], completion)

    def _give_up(self, keys: set[int]) -> None:
        for entry in [entry for entry in (*self._running.values(), *self._waiting) if entry.key in keys]:
            running = entry.key in self._running
            self._end(entry, self._stepper.give_up(entry.key) if running else None)

    def _begin_hold(self) -> Future[None]:
        self._hold = self._hold or Future()
        self._settle_hold()
        return self._hold

    def _settle_hold(self) -> None:
        running = self._running.values()
        if self._hold is None or self._hold.done() or not all(entry.request.pausable for entry in running):
            return
        if running:
            try:
                self._stepper.forget()
            except Exception as error:  # noqa: BLE001 as a step
                self._fail(self._host.failed(error))
        for entry in running:
            entry.note(self._stepper.sampled(entry.key))
        self._hold.set_result(None)

    def _release(self) -> None:
        self._progress = time.monotonic()  # before the hold ends, for whoever reads both
        self._hold = self._closed_by = None
        for entry in self._running.values():
            entry.version = self._host.version_for(entry.request)

    def _close(self, error: Exception) -> None:
        self._closed_by = error
        self._fail(error)

    def _fail(self, error: Exception, entries: Sequence[_Entry] | None = None) -> None:
        for entry in [*self._running.values(), *self._waiting] if entries is None else entries:
            if entry.key in self._running:
                with suppress(Exception):
                    self._stepper.give_up(entry.key)
            self._end(entry, error)

    def _end(self, entry: _Entry, outcome: Completion | Exception | None) -> None:
        if self._running.pop(entry.key, None) is None:
            self._waiting.remove(entry)
        self._progress = time.monotonic()
        self._host.ended(entry.request)
        if isinstance(outcome, Exception):
            entry.result.set_exception(outcome)
            return
        completion = outcome or Completion(None, 0)
        if completion.output is not None:
            entry.note(len(completion.output.token_ids))
            self._count(entry, len(completion.output.token_ids))
        entry.result.set_result(completion._replace(spans=tuple(entry.spans)))

    def _count(self, entry: _Entry, tokens: int) -> None:
        if self._stretch is not None:
            self._stretch.end = time.monotonic_ns()
            self._stretch.version = max(self._stretch.version, entry.version)
            self._stretch.responses += 1
            self._stretch.prompt_tokens += len(entry.request.prompt_ids)
            self._stretch.response_tokens += tokens


def _settle(result: Future[Any], function: Callable[[], Any]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:  # noqa: BLE001 who waits for it gets it
        result.set_exception(error)
