"""Plays environments of verifiers: a process of theirs, an endpoint of ours, and the record on our side."""

import asyncio
import itertools
import secrets
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from adapters.verifiers.child import MODEL, TOKEN_HEADER
from adapters.verifiers.process import VerifiersProcess, VerifiersSettings
from rl_backend.contracts import BatchError, ConfigError, EpisodeEndError, EpisodeFailedError
from rl_backend.data.rewards.worker_pool import EventLoop
from rl_backend.environment.protocol import Result, Sampler, Stop, Turn

# Sampling parameters that a request may bring. The others are the run's, and would be ignored.
_OURS = frozenset({"max_tokens", "stop_token_ids", "logprobs", "skip_special_tokens"})
_MOST_BYTES = 64 * 2**20


@dataclass
class Session:
    """An episode that is being played.

    Attributes:
        loop: in which the episode is played, and the sampler is asked.
        turns: prompt and turn of each request, in the order of the answers.
        ended: why the sampler gave no further turn.
        failed: what the engines or the record raised.
        sampling: turns in flight.
    """

    sampler: Sampler
    loop: asyncio.AbstractEventLoop
    turns: list[tuple[list[int], Turn]] = field(default_factory=list)
    ended: EpisodeEndError | None = None
    failed: Exception | None = None
    sampling: set[Future[Turn]] = field(default_factory=set)
    over: bool = False

    async def sample(self, prompt: list[int], stop_token_ids: Sequence[int], max_tokens: int | None) -> Turn | None:
        """Asks the sampler, in the loop of the episode; None where that ended meanwhile."""
        asked = self.sampler.sample(prompt, stop_token_ids=stop_token_ids, max_tokens=max_tokens)
        turn = asyncio.run_coroutine_threadsafe(_awaited(asked), self.loop)
        self.sampling.add(turn)
        if self.over:
            turn.cancel()
        try:
            return await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None
        finally:
            self.sampling.discard(turn)

    def end(self) -> None:
        self.over = True
        # Turns in flight, which nobody will train on.
        for turn in list(self.sampling):
            turn.cancel()


class TokenEndpoint:
    """Listens on a free port of 127.0.0.1 while it is open.

    Args:
        context_tokens: of the engines, for the client's own check.
        stop_token_ids: beside those of each request.
    """

    def __init__(self, context_tokens: int, stop_token_ids: Sequence[int] = ()) -> None:
        self._context_tokens = context_tokens
        self._stop_token_ids = stop_token_ids
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def open(self) -> None:
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextmanager
    def session(self, sampler: Sampler) -> Iterator[tuple[str, Session]]:
        """The token of the episode that the running loop plays. It is of no use afterwards; turns in flight are given up."""
        token, session = secrets.token_urlsafe(32), Session(sampler, asyncio.get_running_loop())
        self._sessions[token] = session
        try:
            yield token, session
        finally:
            del self._sessions[token]
            session.end()

    def _session(self, request: web.Request) -> Session:
        found = self._sessions.get(request.headers.get(TOKEN_HEADER, ""))
        if found is None:
            raise web.HTTPForbidden(text="no episode has this token")
        return found

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": self._context_tokens}]})

    async def _generate(self, request: web.Request) -> web.Response:
        session = self._session(request)
        body = await request.json()
        asked = {name: value for name, value in body.get("sampling_params", {}).items() if value is not None}
        others = sorted(asked.keys() - _OURS)
        if others or "features" in body or "content_parts" in body:
            named = ", ".join(others)
            problem = f"{named}: set by the run, leave it out" if others else "models are sampled with text alone"
            session.failed = BatchError(f"verifiers asked for {problem}")
            return _refused(session.failed.args[0])
        prompt = [int(each) for each in body["token_ids"]]
        try:
            stops = list(dict.fromkeys([*(asked.get("stop_token_ids") or ()), *self._stop_token_ids]))
            turn = await session.sample(prompt, stops, asked.get("max_tokens"))
        except EpisodeEndError as end:
            session.ended = end
            return _refused(end.message)
        except Exception as error:  # noqa: BLE001, the player raises it where the episode is
            session.failed = error
            return _refused(f"{type(error).__name__}: {error}")
        if turn is None:
            return _refused("the episode has ended")
        session.turns.append((prompt, turn))
        return web.json_response(_answer(turn))


async def _awaited(turn: Awaitable[Turn]) -> Turn:
    return await turn


def _answer(turn: Turn) -> dict[str, Any]:
    pairs = zip(turn.token_ids, turn.log_probs, strict=True)
    log_probs = {"content": [{"token": f"token_id:{token}", "logprob": log_prob} for token, log_prob in pairs]}
    choice = {"index": 0, "token_ids": list(turn.token_ids), "finish_reason": turn.finish, "logprobs": log_probs}
    return {"request_id": secrets.token_hex(8), "choices": [choice]}


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error", "code": 400}}, status=400)


# Limits of verifiers' own, as its traces name them, and those of an episode. Any other condition is the environment's.
STOPS: Mapping[str, Stop] = {
    "max_turns": "turns",
    "max_input_tokens": "tokens",
    "max_output_tokens": "tokens",
    "max_total_tokens": "tokens",
    "compaction_failed": "context",
    "setup_timeout": "timeout",
    "agent_timeout": "timeout",
    "finalize_timeout": "timeout",
    "scoring_timeout": "timeout",
}


class VerifiersPlayer:
    """A :class:`~rl_backend.environment.protocol.Player` of an environment of verifiers 0.4.

    What our sampler recorded is trained on. An episode of which verifiers reports other tokens is an error, and an
    environment of several agents is refused. It serves one event loop after the other.

    Args:
        context_tokens: of the engines.
    """

    def __init__(self, settings: VerifiersSettings, *, context_tokens: int) -> None:
        self._settings = settings
        self._endpoint = TokenEndpoint(context_tokens, settings.stop_token_ids)
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._opening = threading.Lock()
        self._loop: EventLoop | None = None
        self._child: VerifiersProcess | None = None

    @property
    def tasks(self) -> Sequence[str]:
        """Names of the environment's tasks; a row names one by ``{"task": index}``. Opens the player."""
        return self.open()._opened().tasks

    def open(self) -> Self:
        with self._opening:
            if self._child is None:
                self._loop = EventLoop()
                try:
                    self._loop.run(self._endpoint.open()).result()
                    self._child = VerifiersProcess(self._settings, self._endpoint.url, self._settle, self._lose)
                except BaseException:
                    self._end()
                    raise
        return self

    def close(self) -> None:
        with self._opening:
            self._end()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __call__(self, row: Mapping[str, Any], sampler: Sampler) -> Result:
        child = (await asyncio.to_thread(self.open))._opened()
        task = row.get("task")
        if not isinstance(task, int) or not 0 <= task < len(child.tasks):
            problem = f"expected the number of a task of the environment, 0 to {len(child.tasks) - 1}"
            raise ConfigError.of("task", task, problem)
        number = next(self._numbers)
        answer: Future[dict[str, Any]] = Future()
        # From here on a cancellation cannot make set_result fail, which would end the thread that all episodes wait for.
        answer.set_running_or_notify_cancel()
        self._waiting[number] = answer
        with self._endpoint.session(sampler) as (token, session):
            try:
                child.send({"play": number, "task": task, "token": token})
                played = await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                child.send({"cancel": number})
                raise
            finally:
                del self._waiting[number]
        return _result(played, session)

    def _opened(self) -> VerifiersProcess:
        assert self._child is not None  # see open
        return self._child

    def _end(self) -> None:
        child, self._child, loop, self._loop = self._child, None, self._loop, None
        if child is not None:
            child.end()
        if loop is not None:
            loop.run(self._endpoint.close()).result()
            loop.close()

    def _settle(self, message: dict[str, Any]) -> None:
        waiting = self._waiting.get(message["played"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _lose(self) -> None:
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(EpisodeFailedError("the process of verifiers ended; see its output above"))


def _result(played: Mapping[str, Any], session: Session) -> Result:
    ended = session.failed or session.ended
    if ended is not None:
        raise ended
    if played["errors"]:
        return Result(stop="error", error="; ".join(played["errors"]))
    traces = played["traces"]
    if len(traces) != 1:
        agents = ", ".join(trace["agent"] for trace in traces)
        raise BatchError(
            f"an episode of the agents {agents}; only environments in which one agent runs once can be trained on"
        )
    (trace,) = traces
    _compare(trace["branches"], session)
    stop = STOPS.get(trace["stop"] or "", "done")
    error = "" if stop == "done" else f"verifiers' own limit: {trace['stop']}"
    metrics = {name: float(value) for name, value in trace["metrics"].items()}
    return Result(float(trace["reward"]), metrics, stop, error)


def _compare(branches: Sequence[Mapping[str, Any]], session: Session) -> None:
    # What is trained on is our record: it must be what the environment rewarded.
    for prompt, turn in session.turns:
        ids, end = [*prompt, *turn.token_ids], len(prompt) + len(turn.token_ids)
        if not any(branch["token_ids"][:end] == ids and all(branch["sampled"][len(prompt) : end]) for branch in branches):
            raise BatchError(
                f"verifiers reports no branch with the {len(turn.token_ids)} tokens that were sampled after {len(prompt)}"
            )
