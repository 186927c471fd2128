"""Rewards of many responses: several functions, at once, within a limit of time, and calls that fail."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_backend.contracts import ConfigError, RewardError
from rl_backend.data.rewards import LoadedReward, RewardCall, RewardConfig, RewardScorer, reward_metrics
from tests.support.claims import ROOT
from tests.support.rewards import calls, later, of, values


@pytest.mark.shows("rewards: several functions are added with their weights, and each has its metrics by its name")
def test_several_functions_are_weighted_and_each_is_measured(reward_file: Path) -> None:
    functions = {
        "right": {"function": f"{reward_file}:exact", "weight": 2},
        "short": {"function": f"{reward_file}:length", "weight": -0.5},
        "seen": {"function": f"{reward_file}:judged", "weight": 0},
    }
    with RewardConfig.model_validate({"functions": functions}).load() as rewards:
        scores = rewards.score(calls("4", "five"))
    assert values(scores) == [2 * 1 - 0.5 * 1, -0.5 * 4]
    assert reward_metrics(scores) == {
        "reward/right": 0.5,
        "reward/right/acc": 0.5,
        "reward/short": 2.5,
        "reward/seen": 2.5,
    }
    assert scores[1].info == {
        "right": {"score": 0.0, "acc": 0.0, "pred": "five"},
        "short": {"score": 4.0},
        "seen": {"score": 4.0},
    }


@pytest.mark.shows("rewards: numbers that a function returns beside its score are metrics, all else goes to samples.jsonl")
def test_what_a_function_returns_beside_its_score_is_kept() -> None:
    def reward(solution_str: str, **_: Any) -> dict[Any, Any]:
        more = {"steps": np.int64(3)} if solution_str == "b" else {}
        kept = {"acc": True, "odd": torch.tensor(0.5), "nan": float("nan"), "text": "12", "list": [1, {"a": 2}], 7: 1}
        return {"score": 1, **kept, "set": {1}, "big": 10**5000, "vector": torch.ones(2), "complex": 1j, **more}

    scores = of(reward).score(calls("a", "b"))
    assert reward_metrics(scores) == {"reward/7": 1.0, "reward/acc": 1.0, "reward/odd": 0.5, "reward/steps": 3.0}
    info = dict(scores[1].info)
    assert info.pop("nan") != info.get("nan")
    assert info == {
        "acc": 1.0,
        "odd": 0.5,
        "text": "12",
        "list": [1, {"a": 2}],
        "7": 1.0,
        "steps": 3.0,
        "set": "{1}",
        "big": "<int of 16610 bits>",
        "vector": "tensor([1., 1.])",
        "complex": "1j",
    }


@pytest.mark.parametrize("options", [{}, {"workers": 4}, {"timeout_seconds": 60.0}], ids=str)
def test_scores_are_in_the_order_of_the_calls(options: dict[str, Any], opened: ExitStack) -> None:
    slow = later(seconds={"a": 0.2, "bb": 0.1})
    rewards = opened.enter_context(of(slow, **options))
    assert values(rewards.score(calls("a", "bb", "ccc"))) == [1, 2, 3]
    assert values(rewards.score(calls("dddd"))) == [4]


GREEDY = """
def takes(data_source, solution_str, ground_truth, extra_info=None, prompt=None):
    found = len(ground_truth["left"]) + len(extra_info["cases"]) + len(prompt[0]["content"])
    ground_truth["left"].remove(solution_str)
    extra_info["cases"].clear()
    extra_info["more"] = 1
    prompt[0]["content"] = ""
    prompt.append({"role": "user", "content": "x"})
    return found

async def waits(data_source, solution_str, ground_truth, extra_info=None, prompt=None):
    return takes(data_source, solution_str, ground_truth, extra_info, prompt)
"""


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"processes": True}], ids=str)
def test_a_function_under_two_names_is_called_for_each(
    options: dict[str, Any], reward_file: Path, opened: ExitStack
) -> None:
    functions: Any = {
        "once": f"{reward_file}:length",
        "twice": {"function": f"{reward_file}:length", "weight": 2},
        "right": f"{reward_file}:exact",
    }
    scores = opened.enter_context(RewardConfig(functions=functions, **options).load()).score(calls("4", "five"))
    assert [[score.numbers[name] for name in functions] for score in scores] == [[1, 1, 1], [4, 4, 0]]
    assert values(scores) == [1 + 2 * 1 + 1, 4 + 2 * 4]


@pytest.mark.shows("rewards: what a function does to its arguments reaches no other call and no other function")
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"timeout_seconds": 60.0}, {"processes": True}], ids=str)
@pytest.mark.parametrize("functions", [("takes",), ("takes", "waits"), ("waits", "takes")], ids="-".join)
def test_a_function_that_changes_its_arguments_changes_its_own(
    functions: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "greedy.py"
    file.write_text(GREEDY)
    row = {"left": ["x", "y"]}, {"cases": [[1], [2]]}, [{"role": "user", "content": "2+2?"}]
    truth, extra, prompt = deepcopy(row)
    samples = [RewardCall("sums", answer, truth, extra, prompt) for answer in ("x", "y", "x")]
    with RewardConfig(functions=[f"{file}:{name}" for name in functions], **options).load() as rewards:
        for _ in range(2):
            assert values(rewards.score(samples)) == [8 * len(functions)] * 3
    assert (truth, extra, prompt) == row


@pytest.mark.shows("rewards: a function that has a parameter for the prompt is given it, text or messages")
@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"processes": True}], ids=str)
def test_a_function_that_asks_for_the_prompt_is_given_it(
    options: dict[str, Any], reward_file: Path, opened: ExitStack
) -> None:
    rewards = opened.enter_context(RewardConfig(functions=f"{reward_file}:shown", **options).load())
    prompts: list[Any] = ["2+2=", [{"role": "user", "content": "2+2?"}]]
    scores = rewards.score([RewardCall("sums", "4", "4", {}, prompt) for prompt in prompts])
    assert [score.info["prompt"] for score in scores] == prompts


def test_an_asynchronous_function_is_given_the_prompt_too(opened: ExitStack) -> None:
    async def judge(solution_str: str, prompt: str, **_: Any) -> float:
        return len(prompt)

    assert values(opened.enter_context(of(judge)).score(calls("4"))) == [len("2+2=")]


def test_plain_functions_run_one_after_the_other_in_the_callers_thread_unless_told_otherwise() -> None:
    def reward(**_: Any) -> float:
        return threading.get_ident()

    assert values(of(reward).score(calls("a", "b"))) == [threading.get_ident()] * 2
    with of(reward, workers=2) as rewards:
        assert threading.get_ident() not in values(rewards.score(calls("a", "b")))


@pytest.mark.parametrize(("workers", "most"), [(3, 3), (1, 1)])
def test_as_many_plain_calls_go_on_at_once_as_there_are_workers(workers: int, most: int, opened: ExitStack) -> None:
    running: list[int] = []
    slow = later(seconds=dict.fromkeys("abcdef", 0.05), running=running)
    opened.enter_context(of(slow, workers=workers, timeout_seconds=60.0)).score(calls(*"abcdef"))
    assert max(running) == most


@pytest.mark.shows("rewards: asynchronous functions are called many at once")
def test_asynchronous_functions_wait_together(opened: ExitStack) -> None:
    async def reward(solution_str: str, **_: Any) -> float:
        nonlocal going, most
        going += 1
        most = max(most, going)
        await asyncio.sleep(0.05)
        going -= 1
        return 1.0

    for concurrency, expected in ((None, 40), (7, 7)):
        going = most = 0
        rewards = opened.enter_context(of(reward, concurrency=concurrency))
        assert values(rewards.score(calls(*"a" * 40))) == [1.0] * 40
        assert most == expected


def test_an_object_with_an_asynchronous_call_is_asynchronous(opened: ExitStack) -> None:
    class Judge:
        async def __call__(self, **_: Any) -> float:
            return 0.5

    rewards = opened.enter_context(RewardScorer([LoadedReward(Judge(), "m:judge")]))
    assert values(rewards.score(calls("a"))) == [0.5]


MESSAGE = (
    r"^reward m:reward: the reward function raised ValueError: could not convert string to float: 'x' "
    r"\(.*test_rewards\.py:\d+\), on prompt '2\+2=', "
    r"response 'x', ground truth '4'; correct it, or set on_reward_failure to zero or drop$"
)


@pytest.mark.shows(
    "rewards: a call that fails stops the run, with prompt and response in its message, counts 0 or drops its group"
)
@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
def test_a_call_that_fails_stops_the_run_and_is_shown(options: dict[str, Any], opened: ExitStack) -> None:
    def reward(solution_str: str, **_: Any) -> float:
        return float(solution_str)

    with pytest.raises(RewardError, match=MESSAGE) as failed:
        opened.enter_context(of(reward, **options)).score(calls("1", "x", "2"))
    assert isinstance(failed.value.__cause__, ValueError)


def test_an_asynchronous_call_that_fails_stops_the_run_and_the_other_calls(opened: ExitStack) -> None:
    cancelled = []

    async def reward(solution_str: str, **_: Any) -> float:
        try:
            await asyncio.sleep(0.0 if solution_str == "x" else 600.0)
        except asyncio.CancelledError:
            cancelled.append(solution_str)
            raise
        return float(solution_str)

    with pytest.raises(RewardError, match=MESSAGE):
        opened.enter_context(of(reward)).score(calls("1", "x", "2"))
    assert sorted(cancelled) == ["1", "2"]


@pytest.mark.parametrize("kind", ["plain", "in threads", "asynchronous"])
@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_a_call_that_fails_counts_zero_or_drops(kind: str, policy: Any, opened: ExitStack) -> None:
    def plain(solution_str: str, **_: Any) -> Any:
        if solution_str == "exit":
            sys.exit(3)
        if solution_str == "end":
            raise StopIteration
        if solution_str == "odd":
            return type("Odd", (), {"__float__": lambda _: sys.exit(4)})()
        if solution_str == "own":
            return type("Own", (dict,), {"get": lambda *_: {}["score"]})()
        return {"a": "high", "b": float("nan")}.get(solution_str) or float(solution_str)

    async def asynchronous(**arguments: Any) -> Any:
        return plain(**arguments)

    function, options = {"plain": (plain, {}), "in threads": (plain, {"workers": 2}), "asynchronous": (asynchronous, {})}[
        kind
    ]
    rewards = opened.enter_context(of(function, on_failure=policy, **options))
    scores = rewards.score(calls("1", "x", "2", "a", "b", "exit", "end", "odd", "own"))
    assert values(scores) == [1, 0, 2, 0, 0, 0, 0, 0, 0]
    assert [score.dropped for score in scores] == [policy == "drop" and bool(score.failures) for score in scores]
    problems = ["", "raised ValueError", "", "returned 'high'; expected a real number", "returned nan", "ended the process"]
    problems += ["raised", "ended the process, SystemExit(4)", "raised KeyError: 'score'"]
    for score, problem in zip(scores, problems, strict=False):
        assert len(score.failures) == bool(problem)
        assert all(f"the reward function {problem}" in failure for failure in score.failures)


def test_of_several_functions_the_one_that_fails_counts_zero() -> None:
    def fails(**_: Any) -> float:
        raise OSError

    def works(**_: Any) -> float:
        return 2.0

    (score,) = of(fails, works, on_failure="zero").score(calls("a"))
    assert (score.value, score.numbers, len(score.failures)) == (2.0, {"fails": 0.0, "works": 2.0}, 1)
    assert score.failures[0].startswith("reward 'fails' (m:fails): the reward function raised OSError (")


def test_long_prompts_and_responses_are_shortened_in_messages() -> None:
    def fails(**_: Any) -> float:
        raise ValueError("no")

    prompt = [{"role": "user", "content": "q" * 5000}]
    with pytest.raises(RewardError) as failed:
        of(fails).score([RewardCall("s", "r" * 5000, "g" * 5000, None, prompt)])
    assert 600 < len(str(failed.value)) < 1100


def test_what_a_function_caught_is_raised_after_it() -> None:
    def check() -> None:
        raise KeyboardInterrupt

    def fails(**_: Any) -> float:
        raise ValueError

    for policy in ("stop", "zero"):
        with pytest.raises(KeyboardInterrupt):
            of(fails, on_failure=policy, check=check).score(calls("a"))


def test_scores_begin_before_anyone_waits_for_them(opened: ExitStack) -> None:
    called = threading.Event()

    def reward(**_: Any) -> float:
        called.set()
        return 1.0

    scoring = opened.enter_context(of(reward, workers=2)).begin(calls("a"))
    assert called.wait(timeout=60)
    assert values(scoring.result()) == [1]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (["a.py:f", "b.py:f"], r"=\['a\.py:f', 'b\.py:f'\]: two are named 'f'; name them, such as f_1=a\.py:f"),
        ({"a b": "m:f"}, r"='a b': a name has letters, digits"),
        ({"a": {"function": "m:f", "weight": 0}}, r"=\{'a': 0\.0\}: needs at least one function with a weight"),
        ({}, r"=\{\}: expected a function, several, or name"),
        (3, r"=3: expected a function"),
        (["a", 3], r"=\['a', 3\]: expected a function"),
    ],
)
def test_functions_that_cannot_be_told_apart_are_refused(functions: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^RewardConfig\.functions{message}"):
        RewardConfig(functions=functions)


def test_functions_are_given_one_by_one_in_a_list_or_by_name() -> None:
    assert RewardConfig(functions=["m:f"]).functions == "m:f"  # type: ignore[arg-type]
    assert RewardConfig(functions=["m:f", "n:g"]) == RewardConfig(functions={"f": "m:f", "g": "n:g"})  # type: ignore[arg-type,dict-item]
    assert RewardConfig(functions=[{"g": "m:f"}, "n:h"]) == RewardConfig(functions={"g": "m:f", "h": "n:h"})  # type: ignore[arg-type,dict-item]
    config = RewardConfig(functions={"f": {"function": "m:f", "weight": 2}})  # type: ignore[dict-item]
    assert RewardConfig.model_validate_json(config.model_dump_json()) == config


def test_options_that_would_be_ignored_are_refused(reward_file: Path) -> None:
    for name, options, message in (
        ("judged", {"workers": 2}, r"^reward_workers=2: .*:judged: asynchronous"),
        ("judged", {"processes": True}, r"^reward_processes=True: .*:judged: asynchronous"),
        ("exact", {"concurrency": 2}, r"^reward_concurrency=2: .*:exact: not asynchronous"),
    ):
        with pytest.raises(ConfigError, match=message):
            RewardConfig(functions=f"{reward_file}:{name}", **options).load()  # type: ignore[arg-type]


def test_the_page_of_rewards_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, of_trl, own_code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)
    (tmp_path / "my_reward.py").write_text(functions)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(own_code, "rewards.md", "exec"), names)
    assert names["values"] == [1.0, 0.0, 0.0]
    assert names["metrics"] == {"reward/has_answer": 1.0}
    for name in ("compute_score", "judged"):
        RewardConfig(functions=f"my_reward.py:{name}").load()
    (tmp_path / "of_trl.py").write_text(of_trl)
    asked = [{"role": "user", "content": "2 + 2 ="}]
    row = RewardCall("sums", " 4\n", None, None, asked, columns={"prompt": asked, "answer": "4"})
    assert values(RewardConfig(functions="of_trl.py:accuracy").load().score([row])) == [1]
