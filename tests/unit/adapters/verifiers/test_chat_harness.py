"""The harness that is put in the way of verifiers: what it asks the model, and what it makes of the answer."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

PLUGIN = "adapters.verifiers.plugins.rl_backend_chat"


class Harness:
    """Stands for verifiers' own."""

    def __class_getitem__(cls, config: Any) -> type:
        return cls

    def resolve_prompt(self, data: Any) -> Any:
        return data


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ("verifiers", "verifiers.v1", "verifiers.v1.dialects", "verifiers.v1.dialects.chat")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["verifiers"].v1 = modules["verifiers.v1"]
    modules["verifiers.v1"].Harness, modules["verifiers.v1"].HarnessConfig = Harness, object
    modules["verifiers.v1"].ProgramResult = lambda **fields: fields
    modules["verifiers.v1.dialects.chat"].message_to_wire = lambda message: {"wire": message}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    yield importlib.import_module(PLUGIN).ChatHarness()
    sys.modules.pop(PLUGIN, None)


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        (("be brief", "hello"), [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]),
        ((None, "hello"), [{"role": "user", "content": "hello"}]),
        (("", ["a", "b"]), [{"wire": "a"}, {"wire": "b"}]),
        (("be brief", None), [{"role": "system", "content": "be brief"}]),
    ],
)
@pytest.mark.parametrize(("status", "code"), [(200, 0), (404, 1), (500, 1)])
def test_the_conversation_is_asked_once_and_an_error_is_told(
    harness: Any, monkeypatch: pytest.MonkeyPatch, prompt: Any, messages: list[Any], status: int, code: int
) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(status, text="said")

    client = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client(transport=httpx.MockTransport(answer)))
    for endpoint in ("http://host:1/v1", "http://host:1/v1/"):
        found = asyncio.run(harness.launch(SimpleNamespace(model="policy"), None, None, endpoint, "secret", {}, prompt))
        assert found == {"exit_code": code, "stdout": "", "stderr": "said" if code else ""}
        request = asked.pop()
        assert not asked and str(request.url) == "http://host:1/v1/chat/completions" and request.method == "POST"
        assert request.headers["authorization"] == "Bearer secret"
        assert json.loads(request.content) == {"model": "policy", "messages": messages}
