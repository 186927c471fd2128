"""Rewards of many responses: options, and every function called for each response, in order or at once, in limited time."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from rl_backend.contracts import MAY_CHANGE, SAME_CONTENTS, BaseConfig, BatchError, ConfigError, RewardError
from rl_backend.data.rewards.function import (
    LoadedReward,
    OnFailure,
    RewardCall,
    Score,
    beside_the_score,
    load_reward,
    score_value,
)
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.data.rewards.worker_pool import (
    BEAT_SECONDS,
    EventLoop,
    Raised,
    TimeLimitError,
    WorkerPool,
    within_limit,
)

_SILENT_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
_ASYNC_AT_ONCE = 64


@dataclass(frozen=True)
class _Result:
    score: float
    numbers: Mapping[str, float]
    info: Mapping[str, Any]


@dataclass(frozen=True)
class _Failure:
    """``problem`` begins with what the function did; ``again``: it may do something else when it is called once more."""

    problem: str
    error: BaseException | None = None
    again: bool = True


@dataclass(frozen=True)
class _Opened:
    loop: EventLoop
    pool: WorkerPool
    at_once: asyncio.Semaphore


type _Found = _Result | _Failure | None
"""None: the function does not judge this response."""
type _Results = list[dict[int, _Found]]


@dataclass(frozen=True)
class _Task:
    """One call of function ``index``, for the responses ``rows``: one, or of a batched function all."""

    index: int
    rows: slice


class RewardScorer:
    """Calls reward functions and adds their weighted scores.

    A batched function is called once for all responses, any other once for each. Asynchronous functions run in one event
    loop, ``concurrency`` calls at once. Plain functions are called one after the
    other by whoever waits for the scores; with ``workers`` above 1 or a limit of time in threads, and with ``processes`` in
    processes, which a limit ends. A thread cannot be ended: a call that takes too long counts as failed, and continues.
    A call that fails is made ``retries`` times more, after a pause where it does not run in the caller's thread; one that
    returned no number is not, nor one that took too long in a thread.

    ``check`` is called after each plain function that ran in the caller's thread, and raises what that may have caught.
    """

    def __init__(
        self,
        rewards: Sequence[LoadedReward],
        *,
        timeout_seconds: float | None = None,
        workers: int = 1,
        processes: bool = False,
        concurrency: int | None = None,
        retries: int = 0,
        on_failure: OnFailure = "stop",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rewards = rewards
        self.on_failure = on_failure
        self._retries = retries
        self._leaves_threads = not processes
        self._limit = timeout_seconds
        self._check = check
        plain = [index for index, reward in enumerate(rewards) if not reward.is_async]
        names = ", ".join(reward.spec for reward in rewards)
        unused: list[tuple[str, object, str]] = []
        if not plain and (workers > 1 or processes):
            option, value = ("reward_processes", True) if processes else ("reward_workers", workers)
            unused = [(option, value, f"{names}: asynchronous, and called by reward_concurrency; leave it out")]
        elif concurrency is not None and len(plain) == len(rewards):
            problem = f"{names}: not asynchronous (async def); set reward_workers instead"
            unused = [("reward_concurrency", concurrency, problem)]
        ConfigError.refuse_all(unused)
        here = workers == 1 and not processes and timeout_seconds is None
        self._here = plain if here else []
        self._there = [index for index in range(len(rewards)) if index not in self._here]
        self._pool_of = {index: place for place, index in enumerate(plain)}
        self._make_pool = partial(
            WorkerPool, [rewards[index] for index in plain], size=workers, processes=processes, limit=timeout_seconds
        )
        self._concurrency = concurrency or _ASYNC_AT_ONCE
        # Loop and pool are opened with the first calls: commands that only check a configuration start no threads.
        self._opening = threading.Lock()
        self._opened: _Opened | None = None

    @property
    def needs_ground_truth(self) -> bool:
        return any(reward.needs_ground_truth for reward in self.rewards)

    @property
    def columns(self) -> list[str]:
        """Of the data set, that rows need."""
        return list(dict.fromkeys(name for reward in self.rewards for name in reward.columns))

    def begin(self, calls: Sequence[RewardCall]) -> Scoring:
        if not self._there:
            return Scoring(self, calls, None)
        with self._opening:
            opened = self._opened = self._opened or _Opened(
                EventLoop(), self._make_pool(), asyncio.Semaphore(self._concurrency)
            )
        return Scoring(self, calls, opened.loop.run(self._call_there(calls, opened)))

    def score(self, calls: Sequence[RewardCall]) -> list[Score]:
        """Raises :class:`RewardError` where a call fails with ``on_failure="stop"``, or cannot be ended."""
        return self.begin(calls).result()

    def close(self) -> None:
        """Ends what is still running, except plain functions in threads."""
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.loop.close()
            opened.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _call_there(self, calls: Sequence[RewardCall], opened: _Opened) -> _Results:

        async def one(task: _Task) -> list[_Found]:
            return self._judged(calls[task.rows], task.index, await self._outcome(calls[task.rows], task.index, opened))

        tasks = self._tasks(self._there, len(calls))
        running = [asyncio.ensure_future(one(task)) for task in tasks]
        try:
            found = await asyncio.gather(*running)
        except BaseException:
            # None may go on behind the error: it would hold a worker that the next batch waits for.
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
        return _by_call(tasks, found, len(calls))

    def _tasks(self, functions: Sequence[int], number: int) -> list[_Task]:
        """Of ``number`` responses, those of the first response first."""
        tasks = [
            _Task(index, rows)
            for index in functions
            for rows in ([slice(0, number)] if self.rewards[index].is_batched else map(_only, range(number)))
        ]
        return sorted(tasks, key=lambda task: (task.rows.start, task.index)) if number else []

    async def _outcome(self, calls: Sequence[RewardCall], index: int, opened: _Opened) -> Any:
        for attempt in range(self._retries):
            result = await self._attempt(calls, index, opened)
            if not isinstance(result, _Failure) or not result.again:
                return result
            await asyncio.sleep(_PAUSE_SECONDS * 2 ** min(attempt, 6))
        return await self._attempt(calls, index, opened)

    async def _attempt(self, calls: Sequence[RewardCall], index: int, opened: _Opened) -> Any:
        reward = self.rewards[index]
        try:
            if not reward.is_async:
                result = await opened.pool.call(self._pool_of[index], reward.keywords(calls))
                return _failure(result) if isinstance(result, Raised) else result
            async with opened.at_once:
                return await self._call_async(reward, calls)
        except TimeLimitError:
            problem = f"took longer than reward_timeout_seconds={self._limit:g}"
            return _Failure(problem, again=reward.is_async or not self._leaves_threads)
        except (asyncio.CancelledError, RewardError):
            raise
        except BaseException as error:  # noqa: BLE001, a function of the user's may raise anything, and on_failure decides
            return _failure(Raised(error))

    async def _call_async(self, reward: LoadedReward, calls: Sequence[RewardCall]) -> Any:
        async def guarded() -> Any:
            try:
                return await reward.function(**reward.keywords(calls))  # type: ignore[misc]
            except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # these would end the loop, or us
                return _failure(Raised(error))

        return await within_limit(asyncio.ensure_future(guarded()), self._limit)

    def _call_here(self, calls: Sequence[RewardCall], index: int) -> list[_Found]:
        result: Any = None
        for _ in range(self._retries + 1):
            try:
                result = self.rewards[index].function(**self.rewards[index].keywords(calls))
            except (Exception, SystemExit) as error:  # noqa: BLE001, as in _attempt
                result = _failure(Raised(error))
            # A function that catches everything has caught the run's own interruption too.
            self._check()
            if not isinstance(result, _Failure):
                break
        return self._judged(calls, index, result)

    def _judged(self, calls: Sequence[RewardCall], index: int, result: Any) -> list[_Found]:
        """Of each call; raises :class:`RewardError` for a failure that is to stop the run."""
        if isinstance(result, _Failure) or not self.rewards[index].is_batched:
            return [self._judged_one(call, index, result) for call in calls]
        try:
            # The elements of a tensor or an array; texts, mappings and sets have elements too, and are no lists of numbers.
            results = None if isinstance(result, str | Mapping | Set) else list(result)
        except TypeError:
            results = None
        except Exception as error:  # noqa: BLE001 of a generator, which runs now
            results = [_failure(Raised(error))] * len(calls)
        if results is None or len(results) != len(calls):
            returned = f"a {type(result).__name__}" if results is None else f"{len(results)} numbers"
            problem = f"returned {returned} for {len(calls)} responses; have it return a list with a number for each"
            results = [_Failure(problem)] * len(calls)
        return [
            None if each is None else self._judged_one(call, index, each) for call, each in zip(calls, results, strict=True)
        ]

    def _judged_one(self, call: RewardCall, index: int, result: Any) -> _Result | _Failure:
        found: _Result | _Failure
        try:
            found = result if isinstance(result, _Failure) else _Result(score_value(result), *beside_the_score(result))
        except BatchError as error:
            found = _Failure(error.message.removeprefix("the reward function "), error.__cause__)
        except (Exception, SystemExit) as error:  # noqa: BLE001, what was returned may have code of its own
            found = _failure(Raised(error))
        if isinstance(found, _Failure) and self.on_failure == "stop":
            message = f"{self._describe(call, index, found)}; correct it, or set on_reward_failure to zero or drop"
            raise RewardError(message, function=self.rewards[index].spec) from found.error
        return found

    def _combined(self, call: RewardCall, found: Mapping[int, _Found]) -> Score:
        results = {index: result for index, result in found.items() if result is not None}
        if not results:  # TRL leaves such a response out of its group
            results = {0: self._judged_one(call, 0, _Failure("judged nothing, and no other did (all returned None)"))}
        value = 0.0
        numbers: dict[str, float] = {}
        info: dict[str, Any] = {}
        failures: list[str] = []
        for index, result in sorted(results.items()):
            reward = self.rewards[index]
            if isinstance(result, _Failure):
                failures.append(self._describe(call, index, result))
                result = _Result(0.0, {}, {})
            value += reward.weight * result.score
            if reward.name:
                numbers |= {reward.name: result.score}
                numbers |= {f"{reward.name}/{key}": number for key, number in result.numbers.items()}
                info[reward.name] = {"score": result.score, **result.info}
            else:
                numbers, info = dict(result.numbers), dict(result.info)
        return Score(value, numbers, info, failures, dropped=bool(failures) and self.on_failure == "drop")

    def _describe(self, call: RewardCall, index: int, failure: _Failure) -> str:
        return f"{self.rewards[index]}: the reward function {failure.problem}, on {call}"

    def _require_beat(self) -> None:
        """Raises :class:`RewardError` when the event loop stands still for longer than a call may take."""
        opened = self._opened
        if opened and self._limit is not None and opened.loop.silent_seconds > self._limit + _SILENT_SECONDS:
            names = ", ".join(reward.spec for reward in self.rewards if reward.is_async)
            raise RewardError(
                f"reward_timeout_seconds={self._limit:g}: {names} blocks the event loop for longer; have it "
                "await what it waits for, or make it a plain function (def)"
            )


class Scoring:
    """Scores that are being made."""

    def __init__(self, scorer: RewardScorer, calls: Sequence[RewardCall], there: Future[_Results] | None) -> None:
        self._scorer = scorer
        self._calls = calls
        self._there = there

    def result(self) -> list[Score]:
        scorer = self._scorer
        number = len(self._calls)
        tasks = scorer._tasks(scorer._here, number)
        here = _by_call(tasks, [scorer._call_here(self._calls[task.rows], task.index) for task in tasks], number)
        there: _Results = [{}] * number if self._there is None else self._wait(self._there)
        return [
            scorer._combined(call, results | others) for call, results, others in zip(self._calls, here, there, strict=True)
        ]

    def cancel(self) -> None:
        if self._there is not None:
            self._there.cancel()

    def _wait(self, there: Future[_Results]) -> _Results:
        while True:
            # In beats: a function that blocks the loop would keep its own time limit from being noticed.
            try:
                return there.result(timeout=BEAT_SECONDS)
            except TimeoutError:
                if there.done():  # or it is what the calls have raised
                    return there.result()
                self._scorer._require_beat()


def _only(row: int) -> slice:
    return slice(row, row + 1)


def _by_call(tasks: Sequence[_Task], found: Sequence[list[_Found]], number: int) -> _Results:
    results: _Results = [{} for _ in range(number)]
    for task, each in zip(tasks, found, strict=True):
        for row, result in zip(results[task.rows], each, strict=True):
            row[task.index] = result
    return results


def _failure(raised: Raised) -> _Failure:
    if raised.error is None:
        return _Failure(raised.problem)
    if isinstance(raised.error, SystemExit):
        return _Failure(f"ended the process, {raised.error!r} (have it return a number)", raised.error)
    return _Failure(f"raised {what_it_raised(raised.error)}", raised.error)


class WeightedReward(BaseConfig):
    """One of several reward functions.

    Attributes:
        function: package.module:function or path/file.py:function.
        weight: of its score in the reward; 0 only measures it.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    function: str
    weight: float = 1.0


_WEIGHTED = (str, dict, WeightedReward)
_FUNCTIONS = "RewardConfig.functions"


class RewardConfig(BaseConfig):
    """Reward functions, and how they are called. See docs/rewards.md.

    Attributes:
        functions: a reward function of verl's signature or of TRL's as package.module:function or path/file.py:function,
            plain or async; or several, whose scores are added: a list, or NAME=FUNCTION, or name -> function and weight.
        timeout_seconds: longest time of one call; none: endless.
        workers: calls of plain functions at once, in threads; 1 without a limit of time: in the main thread.
        processes: call plain functions in processes, which a time limit ends and which share no memory.
        concurrency: calls of async functions at once; none: 64.
        retries: more calls in the place of one that raised, ended its process or took too long, before it counts as failed.
        on_failure: when a call raises, takes too long or returns no number: stop the run, count its score as zero, or drop
            the group of its prompt from the batch.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    functions: Annotated[str | dict[str, WeightedReward], SAME_CONTENTS]
    timeout_seconds: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    workers: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    processes: Annotated[bool, MAY_CHANGE] = False
    concurrency: Annotated[int | None, MAY_CHANGE] = Field(default=None, ge=1)
    retries: Annotated[int, MAY_CHANGE] = Field(default=1, ge=0)
    on_failure: OnFailure = "stop"

    @field_validator("functions", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """A list becomes names and functions; a function by itself stays one."""
        if isinstance(given, list | tuple) and len(given) > 1 and all(isinstance(each, str | dict) for each in given):
            named = [
                pair
                for each in given
                for pair in (each.items() if isinstance(each, dict) else [(each.rpartition(":")[2], each)])
            ]
            twice = [name for name, times in Counter(name for name, _ in named).items() if times > 1]
            if twice:
                first = f"{twice[0]}_1={dict(reversed(named))[twice[0]]}"
                raise ConfigError.of(_FUNCTIONS, list(given), f"two are named {twice[0]!r}; name them, such as {first}")
            given = dict(named)
        if isinstance(given, list | tuple) and len(given) == 1:
            given = given[0]
        if isinstance(given, str):
            return given
        # pydantic would tell of every type of the union, in its own words.
        if not (isinstance(given, dict) and given and all(isinstance(each, _WEIGHTED) for each in given.values())):
            raise ConfigError.of(
                _FUNCTIONS, given, "expected a function, several, or name -> function or {function, weight}"
            )
        problem = "a name has letters, digits, _, . and -, because metrics are named by it"
        ConfigError.refuse_all((_FUNCTIONS, name, problem) for name in given if not re.fullmatch(r"\w[\w.-]*", str(name)))
        return {name: {"function": each} if isinstance(each, str) else each for name, each in given.items()}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if isinstance(self.functions, dict) and not any(each.weight for each in self.functions.values()):
            found = {name: each.weight for name, each in self.functions.items()}
            raise ConfigError.of(_FUNCTIONS, found, "needs at least one function with a weight other than 0")
        return self

    def load(self, check: Callable[[], None] = lambda: None) -> RewardScorer:
        """Imports the functions; raises :class:`ConfigError` for one that cannot be loaded, or an option without effect."""
        if isinstance(self.functions, str):
            rewards = [load_reward(self.functions, field=_FUNCTIONS)]
        else:
            rewards = [
                load_reward(each.function, field=f"{_FUNCTIONS}.{name}", name=name, weight=each.weight)
                for name, each in self.functions.items()
            ]
        return RewardScorer(
            rewards,
            timeout_seconds=self.timeout_seconds,
            workers=self.workers,
            processes=self.processes,
            concurrency=self.concurrency,
            retries=self.retries,
            on_failure=self.on_failure,
            check=check,
        )
