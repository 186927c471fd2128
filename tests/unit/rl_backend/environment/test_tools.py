from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import ConfigError, EpisodeFailedError
from rl_backend.data.rewards.function import load_callable
from rl_backend.environment import ToolCall, load_environment
from rl_backend.environment.tool_call_parsers import Attempt
from rl_backend.environment.tools import ToolPool, run_calls, tool_function, tool_schema
from rl_backend.environment.user_code import Caller

FILE = """
import os, time
from typing import Literal

def add(x: int, y: int = 1, how: Literal["plain", "bold"] = "plain") -> int:
    \"\"\"Adds two numbers.

    Args:
        x: the first
        y: the second
    \"\"\"
    return x + y

def process() -> str:
    return str(os.getpid())

def slow() -> None:
    time.sleep(60)

def fails() -> None:
    raise KeyError("no row")

async def later() -> None: ...
def any(*numbers) -> None: ...
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolPool]:
    file = tmp_path_factory.mktemp("tools") / "my_tools.py"
    file.write_text(FILE)
    names = [f"{file}:{name}" for name in ("add", "process", "slow", "fails")]
    with ToolPool(names, workers=2, call_seconds=2.0) as pool:
        yield pool


def run(pool: ToolPool, *attempts: Attempt, **options: Any) -> list[ToolCall]:
    tools = {tool.name: tool for tool in pool.tools}
    return asyncio.run(run_calls(attempts, tools, Caller(), **{"most": None, "seconds": None, **options}))


def test_a_schema_follows_from_the_signature(pool: ToolPool) -> None:
    assert tool_schema(pool.tools[0]) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer", "description": "the first"},
                    "y": {"type": "integer", "description": "the second", "default": 1},
                    "how": {"type": "string", "enum": ["plain", "bold"], "default": "plain"},
                },
                "required": ["x"],
            },
        },
    }
    assert tool_schema(pool.tools[1])["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.shows("environments: what is wrong with a call is answered to the model, and no tool runs in the run's process")
def test_every_attempt_is_answered(pool: ToolPool) -> None:
    calls = run(
        pool,
        Attempt("add", {"x": 2, "y": 3}, raw="add(2, 3)"),
        Attempt("add", {"x": "two"}),
        Attempt("add", {"x": 2, "z": 3}),
        Attempt("sub", {}),
        Attempt("", {}, "invalid_json", "{", "it is not JSON"),
        Attempt("fails"),
        Attempt("process"),
        Attempt("slow"),
        Attempt("add", {"x": 2}),
        most=8,
        seconds=None,
    )
    assert [call.status for call in calls] == [
        "ok", "invalid_arguments", "invalid_arguments", "unknown_tool", "invalid_json", "raised", "ok", "timeout",
        "over_limit",
    ]  # fmt: skip
    answers = [call.answer for call in calls]
    assert answers[0] == "5" and calls[0].raw == "add(2, 3)"
    assert answers[1].startswith("Error: x: Input should be a valid integer")
    assert answers[2] == "Error: z: Extra inputs are not permitted"
    assert answers[3] == "Error: there is no tool 'sub'; there are add, fails, process, slow"
    assert answers[4] == "Error: it is not JSON"
    assert "KeyError: 'no row'" in answers[5]
    assert int(answers[6]) != os.getpid()
    assert answers[7:] == ["Error: the tool took too long", "Error: no more calls are allowed"]


def test_a_pool_serves_one_event_loop_after_the_other() -> None:
    def here(x: int) -> int:
        time.sleep(0.01)
        return x

    async def many() -> list[str]:
        return await asyncio.gather(*[pool.tools[0]({"x": each}) for each in range(8)])

    with ToolPool([here], where="threads", workers=2) as pool:
        for _ in range(2):
            assert asyncio.run(many()) == [str(each) for each in range(8)]


def test_threads_of_this_process_only_if_asked() -> None:
    def here() -> str:
        return f"{os.getpid()} {threading.current_thread() is threading.main_thread()}"

    with ToolPool([here], where="threads") as pool:
        assert run(pool, Attempt("here"))[0].answer == f"{os.getpid()} False"
    with pytest.raises(ConfigError, match="a process cannot find it by this name; define it at the top of a module"):
        ToolPool([here])


ENVIRONMENT = """
def multiply(first: int, second: int) -> int:
    return first * second

def nested():
    def inner() -> None: ...
    return pool_of(inner)

def pool_of(function):
    from rl_backend.environment import ToolPool  # at the top of the file, the process would import it for seconds
    return ToolPool([function], workers=1)

class Multiplies:
    def __init__(self, row, seed):
        self.pool = pool_of(multiply)
"""


@pytest.mark.shows("environments: an environment in a file of its own has tools in processes, as one in a module has")
def test_a_function_of_an_environments_file_runs_in_a_process(tmp_path: Path) -> None:
    file = tmp_path / "my_environment.py"
    file.write_text(ENVIRONMENT)
    made: Any = load_environment(f"{file}:Multiplies")({}, 1)
    with made.pool as pool:
        (call,) = run(pool, Attempt("multiply", {"first": 2, "second": 3}))
    assert (call.status, call.answer) == ("ok", "6")
    nested = load_callable(f"{file}:nested", field="tools")
    with pytest.raises(ConfigError, match=r"my_environment.py:nested.<locals>.inner.*a process cannot find it by this name"):
        nested()


def test_tools_of_an_environments_own() -> None:
    class Door:
        name, description = "open", "Opens."
        parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

        async def __call__(self, arguments: Mapping[str, Any]) -> str:
            await asyncio.sleep(arguments.get("seconds", 0))
            return "open"

    calls = asyncio.run(
        run_calls([Attempt("open"), Attempt("open", {"seconds": 60})], {"open": Door()}, Caller(), most=None, seconds=0.05)
    )
    assert [(call.status, call.answer) for call in calls] == [("ok", "open"), ("timeout", "Error: the tool took too long")]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("later", "is asynchronous"),
        ("any", "cannot be given by name"),
        ("gone", "has no function 'gone'; it has"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(FILE)
    with pytest.raises(ConfigError, match=problem):
        tool_function(f"{tmp_path / 'my_tools.py'}:{name}")


def test_tools_that_a_process_cannot_load_end_the_run(tmp_path: Path) -> None:
    file = tmp_path / "my_tools.py"
    file.write_text(f"import os\nif os.getpid() != {os.getpid()}: raise RuntimeError('gone')\n{FILE}")
    with ToolPool([f"{file}:add"]) as pool, pytest.raises(EpisodeFailedError, match="a process cannot load"):
        run(pool, Attempt("add", {"x": 1}))


def test_a_plain_call_that_hangs_does_not_hold_the_others() -> None:
    async def both() -> list[Any]:
        caller = Caller()
        calls = (caller(time.sleep, 30, seconds=0.05), caller(time.sleep, 0.01, seconds=5.0))
        return await asyncio.gather(*calls, return_exceptions=True)

    begun = time.monotonic()
    slow, quick = asyncio.run(both())
    assert type(slow).__name__ == "TimeLimitError" and quick is None and time.monotonic() - begun < 5
