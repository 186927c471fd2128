"""The process that plays environments of verifiers, with a stand-in for verifiers itself."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adapters.verifiers import child


class Episodes:
    """Stands for verifiers: an environment whose episodes are what their tasks say."""

    def __init__(self) -> None:
        self.clients: list[Any] = []
        self.models: list[Any] = []
        self.configured: Any = None
        self.serving_now = False

    def module(self) -> ModuleType:
        made: Any = ModuleType("verifiers.v1")
        made.resolve_env_config = lambda given: ("resolved", given)
        made.load_environment = self.load
        made.TrainClientConfig = self.client
        made.ModelContext = self.context
        return made  # type: ignore[no-any-return]

    def client(self, **fields: Any) -> Any:
        self.clients.append(fields)
        return SimpleNamespace(**fields)

    def context(self, **fields: Any) -> Any:
        self.models.append(fields["model"])
        return SimpleNamespace(**fields)

    def load(self, configured: Any) -> Any:
        self.configured = configured
        if configured[1].get("broken"):
            raise ModuleNotFoundError("no such taskset")
        names = ["first", None, "third", "fourth"]
        taskset = [SimpleNamespace(data=SimpleNamespace(name=name, idx=index)) for index, name in enumerate(names)]
        return SimpleNamespace(serving=self.serving, taskset=taskset, run_episode=self.run_episode)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.serving_now = True
        yield
        self.serving_now = False

    async def run_episode(self, task: Any, context: Any) -> Any:
        assert self.serving_now
        if task.data.name == "third":
            await asyncio.sleep(60)
        if task.data.name is None:
            raise ValueError("odd task")
        error = SimpleNamespace(type="ToolError", message="no tool")
        mine = SimpleNamespace(
            agent=SimpleNamespace(name="player"),
            reward=1.5,
            metrics={"won": 1.0, "unknown": None},
            stop_condition="max_turns",
            branches=[SimpleNamespace(token_ids=[1, 2], sampled_mask=[False, True])],
            errors=[error],
        )
        return SimpleNamespace(traces=[mine], errors=[SimpleNamespace(type="HarnessError", message="late")])


class Pipe:
    """The run's side of the connection of the child."""

    def __init__(self, *requests: Mapping[str, Any]) -> None:
        self.requests, self.sent = list(requests), list[Any]()
        self.answered = threading.Event()

    def recv_bytes(self) -> bytes:
        request = self.requests.pop(0)
        if "end" in request:
            assert self.answered.wait(10)
        return json.dumps(request).encode() if request else threading.Event().wait()  # type: ignore[return-value]

    def send_bytes(self, data: bytes) -> None:
        self.sent.append(json.loads(data))
        if len(self.sent) == 4:
            self.answered.set()


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch) -> Episodes:
    made = Episodes()
    package = ModuleType("verifiers")
    module = made.module()
    package.v1 = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", module)
    return made


GIVEN = {
    "environment": {"taskset": {}},
    "renderer": {"name": "default"},
    "tokenizer": "/tokenizer",
    "most_tasks": 3,
    "base_url": "http://127.0.0.1:1/v1",
    "path": [],
}


def test_the_child_plays_what_it_is_asked_for_and_answers_each_by_its_number(episodes: Episodes) -> None:
    pipe = Pipe(
        {"play": 5, "task": 0, "token": "t5"},
        {"play": 6, "task": 1, "token": "t6"},
        {"cancel": 99},
        {"play": 7, "task": 2, "token": "t7"},
        {"cancel": 7},
        {"end": True},
        {},
    )
    slept: list[int] = []
    receive = pipe.recv_bytes

    def slowly() -> bytes:
        # An episode begins before it is cancelled.
        slept.append(1)
        threading.Event().wait(0.02)
        return receive()

    pipe.recv_bytes = slowly  # type: ignore[method-assign]
    asyncio.run(asyncio.wait_for(child.serve(pipe, GIVEN), 20))  # type: ignore[arg-type]
    assert pipe.sent[0] == {"ready": True, "tasks": ["first", "1", "third"]}
    answers = {each["played"]: each for each in pipe.sent[1:]}
    assert answers[6] == {"played": 6, "errors": ["ValueError: odd task"]}
    assert answers[7] == {"played": 7, "errors": ["cancelled"]}
    assert answers[5] == {
        "played": 5,
        "traces": [
            {
                "agent": "player",
                "reward": 1.5,
                "metrics": {"won": 1.0},
                "stop": "max_turns",
                "branches": [{"token_ids": [1, 2], "sampled": [False, True]}],
            }
        ],
        "errors": ["HarnessError: late", "ToolError: no tool"],
    }
    assert episodes.configured == ("resolved", {"taskset": {}}) and not episodes.serving_now
    assert set(episodes.models) == {"policy"}
    assert episodes.clients[1] == {
        "base_url": "http://127.0.0.1:1/v1",
        "renderer": {"name": "default"},
        "renderer_model_name": "/tokenizer",
        "api_key_var": "RL_BACKEND_VERIFIERS_KEY",
        "headers": {"X-RL-Backend-Episode": "t6"},
    }
