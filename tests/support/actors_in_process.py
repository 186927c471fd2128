"""A stand-in for Ray whose actors are objects of this process, for tests of what calls engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError


class Call:
    """A reference to what a call returns; ``done`` at once, or when it is answered."""

    def __init__(self, name: str = "", result: Any = None, *, done: bool = True) -> None:
        self.name, self.result, self.done = name, result, done

    def answer(self, result: Any) -> None:
        self.result, self.done = result, True


class Actor:
    """An engine's handle: answers each method as it is told to, with None by default, and keeps what it was asked.

    Args:
        answers: by method; a function is called with the arguments, and an error is raised.
        silent: methods that are never answered by themselves; :attr:`open` has their calls.
    """

    def __init__(self, name: str, answers: dict[str, Any] | None = None, *, silent: Sequence[str] = ()) -> None:
        self.name = name
        self.answers = {} if answers is None else answers
        self.silent = set(silent)
        self.asked: list[tuple[Any, ...]] = []
        self.open: list[Call] = []
        self.options: dict[str, dict[str, Any]] = {}
        self.killed = False

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *args: self._ask(method, args), options=lambda **how: self._with(method, how))

    def _with(self, method: str, how: dict[str, Any]) -> Any:
        self.options[method] = how
        return getattr(self, method)

    def _ask(self, method: str, args: tuple[Any, ...]) -> Call:
        self.asked.append((method, *args))
        call = Call(method)
        if self.killed:
            call.result = ActorDiedError()
        elif method in self.silent:
            call.done = False
            self.open.append(call)
        else:
            answer = self.answers.get(method)
            call.result = answer(*args) if callable(answer) else answer
            if isinstance(call.result, Exception):
                call.result = RayTaskError(method, f"Traceback of {method}", call.result)
        return call


class RayInProcess:
    """``ray``, as far as groups of engines use it. Waiting in vain takes no time; :attr:`waited` has for how long it was."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.waited: list[float | None] = []
        self.initialized = True
        self.node, self.here = "node 0", threading.Event()

    def wait(
        self, calls: Sequence[Call], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
    ) -> tuple[list[Call], list[Call]]:
        done = [call for call in calls if call.done][:num_returns]
        if len(done) < num_returns:
            self.waited.append(timeout)
            time.sleep(0.001)
        return done, [call for call in calls if call not in done]

    def get(self, call: Call, timeout: float | None = None) -> Any:
        assert call.done
        if isinstance(call.result, Exception):
            raise call.result
        return call.result

    def kill(self, actor: Actor) -> None:
        actor.killed = True
        self.killed.append(actor.name)

    def is_initialized(self) -> bool:
        return self.initialized

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.node)


def use(monkeypatch: pytest.MonkeyPatch, *modules: str) -> RayInProcess:
    """Puts the stand-in in Ray's place in these modules."""
    made = RayInProcess()
    for module in modules:
        monkeypatch.setattr(f"{module}.ray", made)
    return made


def until(true: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
