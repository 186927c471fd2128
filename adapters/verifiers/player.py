"""Plays environments of verifiers: a process of theirs, an endpoint of ours, and the record on our side."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from adapters.verifiers.child import KEY_VARIABLE
from adapters.verifiers.endpoint import Session, TokenEndpoint
from adapters.verifiers.settings import VerifiersSettings
from rl_backend.contracts import BatchError, ConfigError, EpisodeFailedError
from rl_backend.environment.protocol import Result, Sampler

_CHILD = Path(__file__).with_name("child.py")
_ENDING_SECONDS = 5.0
_PLUGINS = Path(__file__).with_name("plugins")


class VerifiersPlayer:
    """A :class:`~rl_backend.environment.protocol.Player` of an environment of verifiers 0.4.

    What is trained is what our sampler recorded, by the ids of each request; the branches that verifiers reports are
    compared with it, and an episode in which they differ is an error. An environment of several agents is refused.

    It belongs to the event loop in which it is opened::

        async with VerifiersPlayer(settings, context_tokens=2048) as player:
            groups = await play_groups(player, tasks, source)

    Args:
        settings: of the environment.
        context_tokens: of the engines.

    Attributes:
        tasks: their names; a row names one by ``{"task": index}``.
    """

    def __init__(self, settings: VerifiersSettings, *, context_tokens: int) -> None:
        self._settings = settings
        self._endpoint = TokenEndpoint(context_tokens, settings.stop_token_ids)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self.tasks: Sequence[str] = ()

    async def __aenter__(self) -> VerifiersPlayer:
        await self._endpoint.open()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._end, self._process)
        await self._endpoint.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Lets the environment end what it serves, for a while."""
        with suppress(EpisodeFailedError, subprocess.TimeoutExpired):
            self._send({"end": True})
            process.wait(_ENDING_SECONDS)
        process.kill()
        process.wait()

    async def __call__(self, row: Mapping[str, Any], sampler: Sampler) -> Result:
        task = row.get("task")
        if not isinstance(task, int) or not 0 <= task < len(self.tasks):
            raise ConfigError.of(
                "task", task, f"expected the number of a task of the environment, 0 to {len(self.tasks) - 1}"
            )
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        with self._endpoint.session(sampler) as (token, session):
            try:
                self._send({"play": number, "task": task, "token": token})
                played = await answer
            except asyncio.CancelledError:
                self._send({"cancel": number})
                raise
            finally:
                del self._waiting[number]
        return _result(played, session)

    async def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            command = [self._settings.python, "-P", str(_CHILD), str(theirs.fileno())]
            # A key of our own: verifiers then reads no settings of its makers' services.
            environment = {**os.environ, KEY_VARIABLE: "unused", "HF_HUB_OFFLINE": "1"}
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment, process_group=0
                )
            except OSError as error:
                raise ConfigError.of("python", self._settings.python, f"cannot be run: {error}") from None
        self._connection = ours
        self._send(
            {
                "environment": self._settings.configured(),
                "renderer": self._settings.renderer,
                "tokenizer": str(Path(self._settings.tokenizer).resolve()),
                "path": [*self._settings.path, str(_PLUGINS)],
                "most_tasks": self._settings.most_tasks,
                "base_url": self._endpoint.url,
            }
        )
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                ready = await asyncio.to_thread(_received, ours)
        except TimeoutError:
            seconds = self._settings.start_seconds
            raise ConfigError.of("start_seconds", seconds, "the environment was not ready by then; raise it") from None
        if ready is None or not ready["ready"]:
            problem = "its process ended; see its output above" if ready is None else ready["problem"]
            raise ConfigError.of("environment", self._settings.environment, f"verifiers cannot load it: {problem}")
        self.tasks = ready["tasks"]
        threading.Thread(target=self._read, args=(ours, asyncio.get_running_loop()), name="verifiers", daemon=True).start()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except (OSError, ValueError) as error:
            raise EpisodeFailedError(f"the process of verifiers has ended: {error}; see its output above") from error

    def _read(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        while not loop.is_closed():
            message = _received(connection)
            if loop.is_closed():
                return
            if message is None:
                loop.call_soon_threadsafe(self._lose)
                return
            loop.call_soon_threadsafe(self._settle, message)

    def _settle(self, message: dict[str, Any]) -> None:
        waiting = self._waiting.get(message["played"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _lose(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EpisodeFailedError("the process of verifiers ended; see its output above"))


def _received(connection: Connection) -> dict[str, Any] | None:
    """A message; None once the other side has ended."""
    try:
        message: dict[str, Any] = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None
    return message


def _result(played: Mapping[str, Any], session: Session) -> Result:
    """The result of an episode; raises what ended it on our side."""
    if session.failed is not None:
        raise session.failed
    if session.ended is not None:
        raise session.ended
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
    return Result(float(trace["reward"]), {name: float(value) for name, value in trace["metrics"].items()})


def _compare(branches: Sequence[Mapping[str, Any]], session: Session) -> None:
    """Refuses an episode of which verifiers reports other tokens than were sampled."""
    for prompt, turn in session.turns:
        ids, end = [*prompt, *turn.token_ids], len(prompt) + len(turn.token_ids)
        if not any(branch["token_ids"][:end] == ids and all(branch["sampled"][len(prompt) : end]) for branch in branches):
            raise BatchError(
                f"verifiers reports no branch with the {len(turn.token_ids)} tokens that were sampled after {len(prompt)}"
            )
