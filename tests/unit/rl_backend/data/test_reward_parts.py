"""Reward functions as they are found and named, and the threads and loops that call them."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rl_backend.contracts import ConfigError
from rl_backend.data.rewards import LoadedReward, RewardConfig
from rl_backend.data.rewards.function import load_callable, load_reward
from rl_backend.data.rewards.worker import location_of, module_at, what_it_raised
from rl_backend.data.rewards.worker_pool import (
    EventLoop,
    Raised,
    TimeLimitError,
    WorkerPool,
    in_thread,
    within_limit,
)
from tests.support.rewards import calls


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("plain", "expected package.module:function or path/to/file.py:function"),
        (":f", "expected package.module:function"),
        ("m:", "expected package.module:function"),
        ("no/such.py:f", "no/such.py failed: FileNotFoundError: "),
        ("no_such_module_x:f", "cannot import no_such_module_x: ModuleNotFoundError: "),
        ("{file}:gone", "{file} has no function 'gone'; it has one, two$"),
        ("{file}:NUMBER", "{file} has no function 'NUMBER'; it has one, two$"),
        ("{bad}:f", "{bad} failed: ZeroDivisionError: "),
        ("math:gone", "math has no function 'gone'$"),
    ],
)
def test_a_function_that_cannot_be_found_is_refused(tmp_path: Path, spec: str, message: str) -> None:
    file, bad = tmp_path / "mine.py", tmp_path / "bad.py"
    file.write_text("from os.path import join\nNUMBER = 3\ndef one(): ...\ndef two(): ...\n")
    bad.write_text("1 / 0\n")
    with pytest.raises(ConfigError) as refused:
        load_callable(spec.format(file=file, bad=bad), field="mine")
    assert str(refused.value).startswith("mine=")
    assert re.search(message.format(file=file, bad=bad), str(refused.value))


def test_a_file_without_its_suffix_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def f(): ...\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"to name a file give folder/\.\./mine\.py:f; cannot import"):
        load_callable("folder/../mine:f", field="x")


@pytest.mark.parametrize(
    ("source", "fits"),
    [
        ("def f(data_source, solution_str, ground_truth, extra_info=None): ...", True),
        ("def f(data_source, solution_str, ground_truth, extra_info): ...", True),
        ("def f(solution_str, ground_truth, data_source, extra_info, *, prompt): ...", True),
        ("def f(**kwargs): ...", True),
        ("def f(data_source, solution_str, ground_truth): ...", False),
        ("def f(data_source, solution_str, ground_truth, extra_info, more): ...", False),
        ("def f(data_source, solution_str, ground_truth, extra_info, *, more): ...", False),
    ],
)
def test_a_function_must_take_what_it_is_called_with(tmp_path: Path, source: str, fits: bool) -> None:
    (tmp_path / "mine.py").write_text(source)
    if fits:
        assert load_reward(f"{tmp_path}/mine.py:f").function.__name__ == "f"  # type: ignore[union-attr]
    else:
        with pytest.raises(
            ConfigError, match=r"must take verl's \(data_source, solution_str, ground_truth, extra_info=None\) or TRL's "
        ):
            load_reward(f"{tmp_path}/mine.py:f")


def test_modules_of_files_are_found_again_and_a_broken_one_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nfound = sys.modules[__name__]\n")
    module = module_at(str(tmp_path / "mine.py"))
    assert module.found is module and location_of(module) == str(tmp_path / "mine.py")
    assert location_of(math) == "math"
    before = set(sys.modules)
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit):
        module_at(str(tmp_path / "bad.py"))
    assert set(sys.modules) == before


def test_what_was_raised_is_told_with_its_place() -> None:
    assert what_it_raised(ValueError("x")) == "ValueError: x" and what_it_raised(KeyError()) == "KeyError"
    with pytest.raises(KeyboardInterrupt) as raised:
        wrong_index(3)
    assert what_it_raised(raised.value).startswith(f"KeyboardInterrupt: 3 ({__file__}:")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "expected a function, several, or name -> function"),
        ({}, "expected a function, several"),
        (3, "expected a function, several"),
        ({"a": 3}, "expected a function, several"),
        (["m:f", "n:f"], r"two are named 'f'; name them, such as f_1=m:f"),
        (["m:f", {"f": "k:g"}], r"two are named 'f'; name them, such as f_1=m:f"),
        ({"a b": "m:f"}, "'a b': a name has letters, digits, _, . and -"),
        ({"-a": "m:f"}, "'-a': a name has letters"),
        (
            {"a": {"function": "m:f", "weight": 0}, "b": {"function": "m:g", "weight": 0}},
            "needs at least one function with a",
        ),
        ({"a": {"function": "m:f", "weight": math.inf}}, "weight"),
    ],
)
def test_functions_that_cannot_be_named_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardConfig(functions=given)


def test_functions_are_given_in_several_ways() -> None:
    assert RewardConfig(functions=["m:f"]).functions == "m:f"
    found = RewardConfig(functions=["m:f", {"g-1": {"function": "n:f", "weight": 0}}, "p.py:h"]).functions
    assert isinstance(found, dict)
    assert {name: (each.function, each.weight) for name, each in found.items()} == {
        "f": ("m:f", 1.0), "g-1": ("n:f", 0.0), "h": ("p.py:h", 1.0),
    }  # fmt: skip


def test_every_option_of_a_configuration_reaches_its_scorer(reward_file: Path) -> None:
    functions = {"a": {"function": f"{reward_file}:length", "weight": 2.5}, "b": {"function": f"{reward_file}:judged"}}
    options = {"timeout_seconds": 3.5, "workers": 7, "concurrency": 9, "on_failure": "drop"}
    checked: list[int] = []
    scorer = RewardConfig(functions=functions, **options).load(lambda: checked.append(1))
    assert (scorer._limit, scorer._concurrency, scorer.on_failure) == (3.5, 9, "drop")
    assert scorer._make_pool.keywords == {"size": 7, "processes": False, "limit": 3.5}
    assert [(each.name, each.weight, each.is_async) for each in scorer.rewards] == [("a", 2.5, False), ("b", 1.0, True)]
    alone = RewardConfig(functions=f"{reward_file}:length").load(lambda: checked.append(1))
    assert [score.value for score in alone.score(calls("abc"))] == [3.0] and checked == [1]
    assert (alone._limit, alone._concurrency, alone.rewards[0].name) == (None, 64, "")


def test_a_pool_of_threads_calls_by_index_and_tells_what_is_raised() -> None:
    first, second = LoadedReward(lambda x: x + 1, "m:a"), LoadedReward(wrong_index, "m:b")  # type: ignore[arg-type]

    async def run() -> list[Any]:
        pool = WorkerPool([first, second], size=2, processes=False, limit=None)
        try:
            return [await pool.call(0, {"x": 1}), await pool.call(1, {"x": 1}), await pool.call(0, {"x": 5})]
        finally:
            pool.close()

    one, raised, six = asyncio.run(run())
    assert (one, six) == (2, 6) and isinstance(raised, Raised) and isinstance(raised.error, KeyboardInterrupt)


def wrong_index(x: int) -> Any:
    raise KeyboardInterrupt(x)


def test_a_thread_that_is_too_slow_is_not_used_again() -> None:
    release = threading.Event()
    names: list[str] = []

    def waits(first: bool) -> str:
        names.append(str(threading.get_ident()))
        if first:
            release.wait(20)
        return "done"

    async def run() -> Any:
        pool = WorkerPool([LoadedReward(waits, "m:f")], size=1, processes=False, limit=0.05)  # type: ignore[arg-type]
        with pytest.raises(TimeLimitError):
            await pool.call(0, {"first": True})
        found = [await pool.call(0, {"first": False}) for _ in range(2)]
        release.set()
        pool.close()
        return found

    assert asyncio.run(run()) == ["done", "done"]
    assert names[0] != names[1] == names[2], "the second worker is used again"


def test_an_event_loop_runs_what_it_is_given_and_cancels_the_rest_when_it_ends() -> None:
    loop = EventLoop()
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append("cancelled")

    async def gives(value: int) -> int:
        return value

    assert [loop.run(gives(each)).result(5) for each in (3, 4)] == [3, 4] and loop.silent_seconds < 5
    left = loop.run(waits())
    loop.run(asyncio.sleep(0)).result(5)
    loop.close()
    assert ended == ["cancelled"] and left.done()
    assert not loop._thread.is_alive() and loop._loop.is_closed()


def test_retries_and_processes_of_a_configuration_reach_its_scorer(reward_file: Path) -> None:
    given: dict[str, Any] = {"functions": f"{reward_file}:length", "processes": True, "retries": 4, "workers": 2}
    scorer = RewardConfig(**given).load()
    assert scorer._retries == 4 and not scorer._leaves_threads
    assert scorer._make_pool.keywords == {"size": 2, "processes": True, "limit": None}
    plain = RewardConfig(functions=f"{reward_file}:length").load()
    assert plain._retries == 1 and plain._leaves_threads


def test_a_call_within_a_limit_is_cancelled_where_nobody_waits_for_it_any_more() -> None:
    async def run() -> None:
        assert await within_limit(asyncio.ensure_future(asyncio.sleep(0, 3)), None) == 3
        assert await within_limit(asyncio.ensure_future(asyncio.sleep(0, 4)), 5.0) == 4
        gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        gone.cancel()
        with pytest.raises(RuntimeError, match="what it waited for was cancelled"):
            await within_limit(gone, 1.0)
        slow = asyncio.ensure_future(asyncio.sleep(60))
        with pytest.raises(TimeLimitError):
            await within_limit(slow, 0.01)
        inner = asyncio.ensure_future(asyncio.sleep(60))
        outer = asyncio.ensure_future(within_limit(inner, None))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        await asyncio.sleep(0)
        assert slow.cancelled() and inner.cancelled()

    asyncio.run(run())


def test_a_function_has_a_thread_of_its_own_that_ends_with_it() -> None:
    found = in_thread(threading.current_thread).result(5)
    assert found.name == "environment" and found.daemon and found is not threading.current_thread()
    found.join(5)
    assert not found.is_alive()
    raised = in_thread(lambda: wrong_index(7)).result(5)
    assert isinstance(raised, Raised) and isinstance(raised.error, KeyboardInterrupt) and raised.error.args == (7,)


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    modules = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"folder = {folder!r}\n")
        modules.append(module_at(str(tmp_path / folder / "mine.py")))
    assert [module.folder for module in modules] == ["a", "b"]
    assert all(sys.modules[module.__name__] is module for module in modules)
    assert [location_of(module) for module in modules] == [str(tmp_path / folder / "mine.py") for folder in "ab"]
    program = ModuleType("__main__")
    assert location_of(program) is None, "of a prompt of Python's"
    program.__file__ = "/somewhere/train.py"
    assert location_of(program) == "/somewhere/train.py"
