"""Sampling calls; every one is answered, refused, or its engine is found dead."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.cluster import prometheus
from actors.cluster.memory_death import memory_death
from actors.rollout.messages import EngineInfo, Generated, Routes, Sample, prompt_problem, split_routes
from rl_backend.contracts import BatchError, EngineDeadError, EngineDirtyError, RLBackendError, RolloutError


def check_prompts(prompts: Sequence[Sequence[int]], samples: int, seeds: Sequence[int] | None, info: EngineInfo) -> None:
    for index, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt, info.max_model_len, info.vocab_size):
            raise BatchError(f"prompt {index} {problem}", prompt=index)
    if seeds is not None and len(seeds) != len(prompts) * samples:
        raise BatchError(
            f"{len(seeds)} seeds for {len(prompts)} prompts with n={samples}; expected {len(prompts) * samples}"
        )


def outcome_of(reference: Any, engine: str) -> Any:
    """The result of a finished call; or, returned and not raised, the error that it ended with."""
    try:
        return ray.get(reference, timeout=0)
    except RayActorError as error:
        return EngineDeadError(f"{engine} is dead: its process ended ({_reason(error)}); restart it", engine=engine)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RLBackendError):
            return cause
        return RolloutError(f"{engine} failed with {type(cause).__name__}: {cause}\n{error}", engine=engine)
    except RayError as error:
        if memory := memory_death(error):
            return EngineDeadError(f"{engine} is dead: {memory}", engine=engine)
        return EngineDeadError(f"{engine} is dead: {type(error).__name__}: {_reason(error)}; restart it", engine=engine)


@dataclass
class _Queue:
    # Calls that are not known to have ended, in order, and time.monotonic() when the first of them was first seen there.
    calls: list[Any]
    since: float


class SamplingCalls:
    """Calls that sample, by engine, which serves one at a time. One may take ``limit`` seconds."""

    def __init__(self, limit: float) -> None:
        # A process that hangs never answers, and Ray reports only those that end.
        self._limit = limit
        self._lock = threading.Lock()
        self._queues: dict[int, _Queue] = {}

    def add(self, engine: int, reference: Any) -> None:
        with self._lock:
            queue = self._refreshed(engine)
            if not queue.calls:
                queue.since = time.monotonic()
            self._keep(engine, [*queue.calls, reference])

    def wait(self, engines: Collection[int]) -> dict[int, EngineDeadError]:
        """Waits for the calls made up to now; the error of each engine whose call takes longer than the limit."""
        with self._lock:
            waiting = {call: engine for engine in engines for call in self._refreshed(engine).calls}
        # The calls of an engine that dies end with it.
        hanging: dict[int, EngineDeadError] = {}
        while waiting:
            ready, overdue = self.wait_for_first(waiting, None, fetch=False)
            if overdue is not None:
                engine = waiting[ready]
                hanging[engine] = overdue
                waiting = {call: other for call, other in waiting.items() if other != engine}
            else:
                del waiting[ready]
        return hanging

    def wait_for_first(
        self, calls: Mapping[Any, int], timeout: float | None, *, fetch: bool = True
    ) -> tuple[Any, EngineDeadError | None]:
        """The first of ``calls`` (reference -> engine) that has ended, with ``fetch`` on this node; or one of an engine
        that took longer than the limit, with the error.

        Raises:
            TimeoutError: none has, within ``timeout`` seconds; they may be waited for again.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                left = {engine: self._left(engine) for engine in set(calls.values())}
            seconds = max(min(deadline - time.monotonic(), *left.values()), 0.0)
            done, _ = ray.wait(
                list(calls), num_returns=1, timeout=None if math.isinf(seconds) else seconds, fetch_local=fetch
            )
            if done:
                return done[0], None
            if time.monotonic() >= deadline and timeout is not None:
                raise TimeoutError(f"no engine answered for {timeout:g} s")
            with self._lock:
                overdue = [engine for engine in left if self._left(engine) <= 0]
            for call, engine in calls.items():
                if engine in overdue:
                    return call, self._overdue(engine)

    def _left(self, engine: int) -> float:
        queue = self._refreshed(engine)
        return queue.since + self._limit - time.monotonic() if queue.calls else math.inf

    def _refreshed(self, engine: int) -> _Queue:
        queue = self._queues.setdefault(engine, _Queue([], time.monotonic()))
        if queue.calls:
            _, running = ray.wait(queue.calls, num_returns=len(queue.calls), timeout=0, fetch_local=False)
            if len(running) < len(queue.calls):
                # When one ends, the time of the next begins.
                queue.since = time.monotonic()
                self._keep(engine, running)
        return queue

    def _keep(self, engine: int, calls: list[Any]) -> None:
        self._queues[engine].calls = calls
        prometheus.set_gauge("rl_backend_rollout_queue", len(calls), engine=str(engine))

    def _overdue(self, engine: int) -> EngineDeadError:
        name = f"engine {engine}"
        return EngineDeadError(
            f"{name} has not answered a call to sample for {self._limit:g} s (RolloutConfig.sampling_timeout): its process "
            "hangs and is ended; restart it, or raise the limit if its samples may take longer",
            engine=name,
            sampling_timeout=self._limit,
        )


def collect(calls: Mapping[int, Any], names: Mapping[int, str], timeout: float) -> dict[int, Any]:
    """Waits until every call has ended; each one's outcome. An engine that has not answered for ``timeout`` s counts as
    dead.
    """
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout) if calls else ([], [])
    ended = set(done)
    return {
        engine: outcome_of(reference, names[engine])
        if reference in ended
        else EngineDeadError(f"{names[engine]} did not answer for {timeout:g} s; restart it", engine=names[engine])
        for engine, reference in calls.items()
    }


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    # Of an actor that could not be made, Ray's text ends with the error that it raised.
    return lines[-1] if "creation task" in lines[0] else lines[0]


class PendingSamples:
    """Samples in the making, ``n`` of each prompt.

    Args:
        note: is told an engine's number, the outcome of its call where that is an error, and its actor.
        ask_again: asks other engines for the prompts of one that was lost, or raises its error.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: SamplingCalls,
        note: Callable[[int, Any, Any], None],
        ask_again: Callable[[PendingSamples, range, RLBackendError], None],
    ) -> None:
        self._note = note
        self._ask_again = ask_again
        self._sampling = sampling
        self._prompts = prompts
        self.n = n
        self._calls: dict[Any, tuple[int, range, Any]] = {}
        self._samples: dict[int, Sample] = {}
        self._error: RLBackendError | None = None

    def add(self, reference: Any, engine: int, prompts: range, actor: Any) -> None:
        self._calls[reference] = engine, prompts, actor

    def done(self) -> bool:
        if self._error is not None or not self._calls:
            return True
        ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        return len(ready) == len(self._calls)

    def result(self, timeout: float | None = None) -> list[Sample]:
        """The samples, in the caller's order; raises what ``RolloutGroup.generate`` raises, as soon as it is known."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._calls and self._error is None:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            engines = {reference: engine for reference, (engine, *_) in self._calls.items()}
            reference, overdue = self._sampling.wait_for_first(engines, left)
            engine, prompts, actor = self._calls.pop(reference)
            outcome = overdue or outcome_of(reference, f"engine {engine}")
            if isinstance(outcome, RLBackendError):
                self._note(engine, outcome, actor)
                self._again(prompts, outcome)
            else:
                self._take(engine, prompts, outcome)
        if self._error is not None:
            raise self._error
        return [self._samples[number] for number in range(len(self._prompts) * self.n)]

    def _again(self, prompts: range, error: RLBackendError) -> None:
        # Of an error that is no loss of an engine another one would say the same.
        if isinstance(error, EngineDeadError | EngineDirtyError):
            try:
                self._ask_again(self, prompts, error)
                return
            except RLBackendError as found:
                error = found
        self._error = error

    def _take(self, engine: int, prompts: range, generated: Generated) -> None:
        numbers, responses = range(prompts.start * self.n, prompts.stop * self.n), generated.responses
        routes: Sequence[Routes | None] = [None] * len(responses)
        if generated.routes is not None:
            tokens = zip(numbers, responses, strict=True)
            lengths = [len(self._prompts[number // self.n]) + len(response.token_ids) for number, response in tokens]
            routes = split_routes(generated.routes, lengths, [response.spans[0].version for response in responses])
        for number, response, of_sample in zip(numbers, responses, routes, strict=True):
            prompt, index = divmod(number, self.n)
            self._samples[number] = Sample(
                prompt_index=prompt,
                sample_index=index,
                prompt_ids=list(self._prompts[prompt]),
                response_ids=response.token_ids,
                log_probs=response.log_probs,
                finish_reason="stop" if response.finish_reason == "stop" else "length",
                version_spans=response.spans,
                engine=engine,
                routes=of_sample,
            )
