"""Scores of reward functions: what is read of what they return, how several are combined, and what is said of failures."""

from __future__ import annotations

import asyncio
import math
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_backend.contracts import BatchError, ConfigError, RewardError
from rl_backend.data.rewards import LoadedReward, RewardCall, RewardScorer, Score, reward_metrics, score_value
from rl_backend.data.rewards.function import beside_the_score, for_json
from tests.support.rewards import calls, of

CALL = RewardCall("s", "4", "5", {"a": [1]}, "2+2=")


class Half:
    def __float__(self) -> float:
        return 0.5


class Refuses:
    def __float__(self) -> float:
        raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("result", "number"),
    [
        (3, 3.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.25), 0.25),
        (np.array([2.0]), 2.0) if np.lib.NumpyVersion(np.__version__) < "2.0.0" else (np.array(2.0), 2.0),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([1.5]), 1.5),
        (Half(), 0.5),
        ({"score": 2, "other": "x"}, 2.0),
        ({"score": Half()}, 0.5),
    ],
)
def test_a_number_is_read_whatever_kind_it_is(result: Any, number: float) -> None:
    assert score_value(result) == number and type(score_value(result)) is float


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"returned None; expected a real number \(one, .*\) or a mapping with 'score'"),
        ("1", "returned '1'; expected a real number"),
        ({"value": 1}, r"returned {'value': 1}; expected a real number"),
        ([1.0], r"returned \[1.0\]; expected"),
        (1j, "returned 1j; expected"),
        (np.complex64(1), "expected a real number"),
        (torch.tensor(1j), "expected a real number"),
        (torch.tensor([1.0, 2.0]), "expected a real number .one, finite"),
        (np.array([1.0, 2.0]), "expected a real number .one, finite"),
        ({"score": Refuses()}, "expected a real number .one, finite"),
        (float("nan"), "returned nan; expected"),
        ({"score": -math.inf}, r"returned {'score': -inf}; expected"),
        (10**400, "returned <int of 1329 bits>; expected"),
    ],
)
def test_what_is_no_number_is_refused_with_what_was_returned(result: Any, message: str) -> None:
    with pytest.raises(BatchError, match=f"^the reward function .*{message}"):
        score_value(result)


def test_numbers_and_the_record_of_what_was_returned_beside_the_score() -> None:
    numbers, info = beside_the_score(
        {
            "score": 9,
            "a": 1,
            "b": True,
            "c": "x",
            5: 0.5,
            "d": float("nan"),
            "e": Refuses(),
            "f": np.array([1, 2]),
            "g": None,
        }
    )
    assert numbers == {"a": 1.0, "b": 1.0, "5": 0.5}
    assert {name: info[name] for name in ("a", "b", "c", "5", "g")} == {"a": 1.0, "b": 1.0, "c": "x", "5": 0.5, "g": None}
    assert list(info) == ["a", "b", "c", "5", "d", "e", "f", "g"] and "Refuses" in info["e"] and "array" in info["f"]
    assert beside_the_score(0.5) == ({}, {}) and beside_the_score({"score": 1}) == ({}, {})
    assert for_json({"a": (1, np.float64(2)), "b": np.array(3), "c": Path("x")}) == {
        "a": [1, 2.0],
        "b": 3,
        "c": "PosixPath('x')",
    }
    assert for_json({(1, 2): 3}) == "{(1, 2): 3}"


def test_a_call_is_shown_short_and_its_arguments_are_named() -> None:
    call = RewardCall("s", "r" * 500, None, None, [{"role": "user"}])
    assert call.arguments == {"data_source": "s", "solution_str": "r" * 500, "ground_truth": None, "extra_info": None}
    assert str(call).startswith("prompt [{'role': 'user'}], response 'rrr") and str(call).endswith(", ground truth None")
    assert len(str(call)) < 300


def test_metrics_are_means_over_those_that_have_the_number() -> None:
    scores = [Score(1.0, {"b": 1.0, "a": 2.0}), Score(0.0), Score(0.0, {"a": 5.0}), Score(3.0, {"b": 4.0, "c": 0.0})]
    assert list(reward_metrics(scores).items()) == [("reward/a", 3.5), ("reward/b", 2.5), ("reward/c", 0.0)]
    assert reward_metrics([]) == {}


def weighed(*weights: float, fails: int | None = None, **options: Any) -> RewardScorer:
    """Functions f0, f1, ... that return their number + 1, times ten, beside it."""

    def function(place: int) -> Any:
        def score(solution_str: str, **_: Any) -> Any:
            if place == fails:
                raise ValueError(f"at {place}")
            return {"score": place + 1, "ten": 10 * (place + 1), "text": solution_str}

        return score

    return RewardScorer(
        [LoadedReward(function(place), f"m:f{place}", f"f{place}", weight) for place, weight in enumerate(weights)],
        **options,
    )


def test_scores_of_several_functions_are_weighed_and_told_apart() -> None:
    (score,) = weighed(2.0, -0.5, 0.0).score([CALL])
    assert score.value == 2.0 - 1.0 + 0.0 and score.failures == [] and not score.dropped
    assert score.numbers == {"f0": 1.0, "f0/ten": 10.0, "f1": 2.0, "f1/ten": 20.0, "f2": 3.0, "f2/ten": 30.0}
    assert score.info == {f"f{n}": {"score": n + 1.0, "ten": 10.0 * (n + 1), "text": "4"} for n in range(3)}


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_the_function_that_fails_counts_zero_and_is_named(fails: int, policy: Any) -> None:
    (score,) = weighed(2.0, 3.0, fails=fails, on_failure=policy).score([CALL])
    assert score.value == (6.0 if fails == 0 else 2.0) and score.dropped == (policy == "drop")
    (failure,) = score.failures
    assert failure.startswith(f"reward 'f{fails}' (m:f{fails}): the reward function raised ValueError: at {fails} (")
    assert failure.endswith("on prompt '2+2=', response '4', ground truth '5'")
    assert score.numbers[f"f{fails}"] == 0.0 and f"f{fails}/ten" not in score.numbers
    with pytest.raises(RewardError, match=r"; correct it, or set on_reward_failure to zero or drop$") as stopped:
        weighed(1.0, 1.0, fails=fails).score([CALL])
    assert stopped.value.details == {"function": f"m:f{fails}"} and isinstance(stopped.value.__cause__, ValueError)


def test_a_function_by_itself_has_its_own_names() -> None:
    def alone(**_: Any) -> Any:
        return {"score": 0.5, "len": 3, "why": "x"}

    (score,) = of(alone).score([CALL])
    assert (score.value, score.numbers, score.info) == (0.5, {"len": 3.0}, {"len": 3.0, "why": "x"})
    with pytest.raises(RewardError, match=r"^reward m:wrong: the reward function returned None; expected a real number"):
        of(wrong).score([CALL])


def wrong(**_: Any) -> Any:
    return None


def test_plain_and_asynchronous_functions_are_scored_together_and_in_order(opened: ExitStack) -> None:
    async def waits(solution_str: str, **_: Any) -> float:
        await asyncio.sleep(0.02 if solution_str == "a" else 0)
        return 10 * ord(solution_str)

    def plain(solution_str: str, **_: Any) -> float:
        return ord(solution_str)

    for options in ({}, {"workers": 3}, {"concurrency": 1}):
        scorer = opened.enter_context(of(waits, plain, **options))
        asked = [scorer.begin(calls(*text)) for text in ("ab", "ca")]
        assert [[score.value for score in each.result()] for each in asked] == [[1067, 1078], [1089, 1067]]
        assert scorer.score([]) == []


def test_functions_that_run_here_are_checked_after_each_call() -> None:
    checked: list[int] = []
    scorer = of(lambda **_: 1.0, lambda **_: 2.0, check=lambda: checked.append(1))
    scorer.score(calls("a", "b", "c"))
    assert len(checked) == 6


def test_what_a_scorer_opens_is_closed_and_opened_again() -> None:
    async def plain(**_: Any) -> float:
        return 1.0

    scorer = of(plain)
    before = {thread.name for thread in threading.enumerate()}
    for _ in range(2):
        assert [score.value for score in scorer.score(calls("a"))] == [1.0]
        assert any(thread.name == "rewards" for thread in threading.enumerate())
        scorer.close()
        scorer.close()
    assert {thread.name for thread in threading.enumerate()} <= before | {"rewards"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2}, r"reward_workers=2: m:waits: asynchronous, and called by reward_concurrency; leave it out"),
        ({"processes": True}, r"reward_processes=True: m:waits: asynchronous"),
        ({"processes": True, "workers": 3}, r"reward_processes=True: m:waits"),
    ],
)
def test_options_of_plain_functions_are_refused_for_asynchronous_ones(options: dict[str, Any], message: str) -> None:
    async def waits(**_: Any) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=message):
        of(waits, **options)
    of(waits, wrong, concurrency=2, **options)
    with pytest.raises(ConfigError, match="reward_concurrency=2: m:wrong, m:wrong: not asynchronous"):
        of(wrong, wrong, concurrency=2)


def test_an_answer_is_needed_if_any_function_needs_one() -> None:
    def needs(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        return 0.0

    def free(data_source: str, solution_str: str, ground_truth: Any = None, **_: Any) -> float:
        return 0.0

    def none(**_: Any) -> float:
        return 0.0

    assert [of(each).needs_ground_truth for each in (needs, free, none)] == [True, False, False]
    assert of(free, needs).needs_ground_truth and not of(free, none).needs_ground_truth


def test_functions_that_judge_together_and_apart_are_called_response_by_response() -> None:
    """A batched one comes with the first response; of one response the functions come in their order."""
    said: list[str] = []

    def apart(solution_str: str, **_: Any) -> float:
        said.append(f"apart {solution_str}")
        return 1.0

    def together(completions: list[str]) -> list[float]:
        said.append("together")
        return [10.0] * len(completions)

    def behind(solution_str: str, **_: Any) -> float:
        said.append(f"behind {solution_str}")
        return 100.0

    scores = of(apart, together, behind).score(calls("a", "b"))
    assert said == ["apart a", "together", "behind a", "apart b", "behind b"]
    assert [score.value for score in scores] == [111.0, 111.0]


def test_a_call_that_fails_again_is_judged_by_the_last_one() -> None:
    """Here, in the caller's thread: what an earlier attempt has raised is forgotten, and a number ends them."""
    results: list[Any] = []

    def next_of(**_: Any) -> Any:
        found = results.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    scorer = of(next_of, retries=2, on_failure="zero")
    results[:] = [ValueError("first"), 3.0, 4.0]
    (score,) = scorer.score(calls("a"))
    assert (score.value, score.failures, results) == (3.0, [], [4.0])
    results[:] = [ValueError("first"), ValueError("second"), ValueError("third")]
    (score,) = scorer.score(calls("a"))
    assert score.value == 0.0 and len(score.failures) == 1 and "ValueError: third" in score.failures[0]
    results[:] = ["text", 5.0]
    (score,) = scorer.score(calls("a"))
    assert score.value == 0.0 and results == [5.0], "what returned no number is not called again"


def test_batches_that_are_scored_at_one_time_share_a_loop_and_its_limit(opened: ExitStack) -> None:
    running: list[str] = []
    most: list[int] = []

    async def waits(solution_str: str, **_: Any) -> float:
        running.append(solution_str)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.remove(solution_str)
        return len(solution_str)

    scorer = opened.enter_context(of(waits, concurrency=2))
    first, second = scorer.begin(calls("a", "bb", "ccc")), scorer.begin(calls("dddd", "eeeee"))
    assert [score.value for score in second.result()] == [4, 5] and [score.value for score in first.result()] == [1, 2, 3]
    assert max(most) == 2
