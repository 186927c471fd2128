"""Reward functions that take too long, and those in processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.contracts import RewardError
from rl_backend.data.rewards import RewardConfig, scorer, worker_pool
from tests.support.rewards import calls, later, of, values


@pytest.mark.parametrize("kind", ["in a thread", "asynchronous"])
@pytest.mark.shows("rewards: a call that takes longer than its limit fails, in threads, in processes and asynchronous")
def test_a_call_that_takes_too_long_fails_and_the_others_go_on(kind: str, opened: ExitStack) -> None:
    let_go = threading.Event()
    opened.callback(let_go.set)

    def plain(solution_str: str, **_: Any) -> float:
        if solution_str == "hangs":
            let_go.wait(10.0)
        return 1.0

    async def asynchronous(solution_str: str, **_: Any) -> float:
        await asyncio.sleep(10.0 if solution_str == "hangs" else 0.0)
        return 1.0

    function: Callable[..., Any] = plain if kind == "in a thread" else asynchronous
    rewards = opened.enter_context(of(function, timeout_seconds=0.2, on_failure="zero"))
    scores = rewards.score(calls("a", "hangs", "b", "c"))
    assert values(scores) == [1, 0, 1, 1]
    assert "the reward function took longer than reward_timeout_seconds=0.2, on prompt" in scores[1].failures[0]
    assert values(rewards.score(calls("d"))) == [1]


def test_a_call_waits_for_its_turn_without_losing_time(opened: ExitStack) -> None:
    slow = later(seconds=dict.fromkeys("abcdef", 0.1))
    assert values(opened.enter_context(of(slow, timeout_seconds=0.4)).score(calls(*"abcdef"))) == [1] * 6


def test_calls_that_are_left_behind_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch, opened: ExitStack) -> None:
    monkeypatch.setattr(worker_pool, "MOST_LEFT_BEHIND", 2)
    let_go = threading.Event()
    opened.callback(let_go.set)

    def hangs(**_: Any) -> float:
        let_go.wait()
        return 1.0

    rewards = opened.enter_context(of(hangs, timeout_seconds=0.02, on_failure="zero"))
    assert values(rewards.score(calls("a", "b"))) == [0, 0]
    with pytest.raises(RewardError, match=r"^3 calls of reward functions did not end in time and still go on in threads"):
        rewards.score(calls("c"))


def test_an_asynchronous_function_that_blocks_its_loop_is_an_error(
    monkeypatch: pytest.MonkeyPatch, opened: ExitStack
) -> None:
    monkeypatch.setattr(scorer, "_SILENT_SECONDS", 0.1)
    let_go = threading.Event()
    opened.callback(let_go.set)

    async def reward(**_: Any) -> float:
        let_go.wait()
        return 1.0

    rewards = opened.enter_context(of(reward, timeout_seconds=0.1))
    with pytest.raises(RewardError, match=r"m:reward blocks the event loop for longer; have it await what it waits for"):
        rewards.score(calls("a"))
    let_go.set()


def test_an_asynchronous_function_may_block_its_loop_for_as_long_as_a_call_may_take(
    monkeypatch: pytest.MonkeyPatch, opened: ExitStack
) -> None:
    monkeypatch.setattr(scorer, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(scorer, "BEAT_SECONDS", 0.02)

    async def reward(**_: Any) -> float:
        time.sleep(0.7)  # longer than the loop's own beat
        return 1.0

    assert values(opened.enter_context(of(reward, timeout_seconds=20.0)).score(calls("a"))) == [1]
    assert values(opened.enter_context(of(reward)).score(calls("a"))) == [1]


@pytest.mark.shows("rewards: plain functions can run in processes, which a time limit ends, and a crash ends one call")
def test_processes_call_functions_in_their_main_thread(reward_file: Path, opened: ExitStack) -> None:
    functions = {
        "alarmed": f"{reward_file}:alarmed",
        "where": f"{reward_file}:process",
        "exact": f"{reward_file}:exact",
        "mine": f"{reward_file}:mine",
    }
    rewards = opened.enter_context(RewardConfig(functions=functions, processes=True).load())  # type: ignore[arg-type]
    scores = rewards.score(calls("4", "5", "6"))
    assert [score.numbers["alarmed"] for score in scores] == [1, 1, 1]
    assert [score.numbers["exact"] for score in scores] == [1, 0, 0]
    assert [score.numbers["mine"] for score in scores] == [0.5] * 3
    pids = {score.numbers["where/pid"] for score in scores}
    assert len(pids) == 1 and os.getpid() not in pids
    assert os.getpgid(int(min(pids))) != os.getpgrp(), "a signal to the run's group would end it in the run's last step"
    rewards.close()
    assert not Path(f"/proc/{int(pids.pop())}").exists()


def test_what_fails_in_a_process_is_said_and_another_one_takes_its_place(reward_file: Path, opened: ExitStack) -> None:
    def scores(name: str, *responses: str, **options: Any) -> list[Any]:
        config = RewardConfig(functions=f"{reward_file}:{name}", processes=True, on_failure="zero", **options)
        return opened.enter_context(config.load()).score(calls(*responses))

    died = scores("dies", "a", "die", "b")
    assert values(died) == [1, 0, 1]
    assert "the reward function ended its process, with status -9, on" in died[1].failures[0]
    slow = scores("sleeps", "quick", "slow", "quick", timeout_seconds=0.5)
    assert values(slow) == [1, 0, 1]
    assert "took longer than reward_timeout_seconds=0.5" in slow[1].failures[0]
    for name, problem in (
        ("picky", r"raised ValueError: could not convert string to float: 'x' ("),
        ("leaves", "raised SystemExit: 3 ("),
        ("unsendable", "raised AttributeError: Can't"),
    ):
        assert f"the reward function {problem}" in scores(name, "x")[0].failures[0]


def test_a_process_that_ends_leaves_neither_a_thread_nor_a_socket(reward_file: Path, opened: ExitStack) -> None:
    def held() -> tuple[int, int]:
        threads = [each for each in threading.enumerate() if each.name == "reward"]
        return len(threads), len(os.listdir("/proc/self/fd"))

    # A second call for one that died would come after the last.
    config = RewardConfig(functions=f"{reward_file}:dies", processes=True, retries=0, on_failure="zero")
    rewards = opened.enter_context(config.load())
    assert values(rewards.score(calls("a"))) == [1]
    before = held()
    assert values(rewards.score(calls("die", "die", "die", "a"))) == [0, 0, 0, 1]
    deadline = time.monotonic() + 30
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() == before


def test_calls_that_are_cancelled_while_a_process_loads_leave_it_to_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ntime.sleep(1.5)\n\n\ndef score(**_):\n    return 1.0\n")
    callee = SimpleNamespace(spec=f"{tmp_path}/slow.py:score", function=None)

    async def ask(seconds: float) -> Any:
        return await asyncio.wait_for(workers.call(0, {}), seconds)

    async def run() -> Any:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await ask(0.2)
        return await ask(30), await ask(30)

    workers = worker_pool.WorkerPool([callee], size=2, processes=True, limit=None)
    try:
        assert asyncio.run(run()) == (1.0, 1.0)
        assert len(workers._started) == len(workers._idle) == 1 and not workers._loading
    finally:
        workers.close()


def test_a_process_that_cannot_load_the_function_is_an_error_whatever_the_policy(
    reward_file: Path, opened: ExitStack
) -> None:
    config = RewardConfig(functions=f"{reward_file}:exact", processes=True, on_failure="zero")
    rewards = opened.enter_context(config.load())
    reward_file.write_text("raise RuntimeError('gone')\n")
    with pytest.raises(RewardError, match=r"a process cannot load .*:exact: RuntimeError: gone \(.*my_rewards.py:1\)"):
        rewards.score(calls("a"))


HANGS = """
import sys, time
from rl_backend.data.rewards import LoadedReward, RewardCall, RewardScorer, RewardConfig

call = RewardCall("s", "slow", "4", None)
threads = RewardScorer([LoadedReward(lambda **_: time.sleep(600), "m:f")], timeout_seconds=0.1, on_failure="zero")
assert threads.score([call])[0].value == 0
processes = RewardConfig(functions=sys.argv[1] + ":process", processes=True).load()
print(int(processes.score([call])[0].numbers["pid"]), flush=True)
processes = RewardConfig(functions=sys.argv[1] + ":sleeps", processes=True).load()
processes.begin([call])
time.sleep(0.5)
"""


def test_calls_that_hang_do_not_keep_a_program_that_ends(reward_file: Path) -> None:
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", HANGS, str(reward_file)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    deadline = time.monotonic() + 30
    while Path(f"/proc/{run.stdout.strip()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("kind", ["in the main thread", "in a thread", "asynchronous"])
@pytest.mark.shows("rewards: a call that raises is made again before it counts as failed")
def test_a_call_that_fails_is_made_again(kind: str, opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "_PAUSE_SECONDS", 0.01)
    made: list[str] = []

    def plain(solution_str: str, **_: Any) -> Any:
        made.append(solution_str)
        if solution_str.startswith("fails") and made.count(solution_str) <= int(solution_str[-1]):
            raise ConnectionError("no answer")
        return "no number" if solution_str == "wrong" else 1.0

    async def asynchronous(solution_str: str, **_: Any) -> Any:
        return plain(solution_str)

    function: Callable[..., Any] = asynchronous if kind == "asynchronous" else plain
    options = {"workers": 2} if kind == "in a thread" else {}
    rewards = opened.enter_context(of(function, retries=2, on_failure="zero", **options))
    scores = rewards.score(calls("fine", "fails1", "fails2", "fails3", "wrong"))
    assert values(scores) == [1, 1, 1, 0, 0]
    assert {name: made.count(name) for name in made} == {"fine": 1, "fails1": 2, "fails2": 3, "fails3": 3, "wrong": 1}
    assert "raised ConnectionError: no answer" in scores[3].failures[0]


def test_pauses_between_many_calls_do_not_grow_without_bound(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "_PAUSE_SECONDS", 1e-6)
    made: list[str] = []

    async def fails(solution_str: str, **_: Any) -> float:
        made.append(solution_str)
        raise ConnectionError("no answer")

    rewards = opened.enter_context(of(fails, retries=30, on_failure="zero"))
    assert values(rewards.score(calls("mine"))) == [0] and len(made) == 31


@pytest.mark.parametrize(("kind", "times"), [("in a thread", 1), ("asynchronous", 2)])
def test_a_call_that_took_too_long_is_made_again_where_it_has_ended(kind: str, times: int, opened: ExitStack) -> None:
    let_go, made = threading.Event(), list[str]()
    opened.callback(let_go.set)

    def plain(solution_str: str, **_: Any) -> float:
        made.append(solution_str)
        let_go.wait(10.0)
        return 1.0

    async def asynchronous(solution_str: str, **_: Any) -> float:
        made.append(solution_str)
        await asyncio.sleep(10.0)
        return 1.0

    function: Callable[..., Any] = plain if kind == "in a thread" else asynchronous
    rewards = opened.enter_context(of(function, timeout_seconds=0.1, retries=1, on_failure="zero"))
    assert values(rewards.score(calls("a"))) == [0] and made == ["a"] * times
