"""The engines as an endpoint of token ids on loopback, which speaks what verifiers' ``TrainClient`` asks of vLLM.

Every request needs the token of an episode that is being played, which only the process that plays it has been given.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from adapters.verifiers.child import MODEL, TOKEN_HEADER
from rl_backend.contracts import BatchError, EpisodeEndError
from rl_backend.environment.protocol import Sampler, Turn

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
