"""Held-out sets as options, as prompts, and as lines of results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.collect import inputs as inputs_module
from actors.collect.collector import WeightVersions
from actors.collect.held_out import HeldOutResult, HeldOutSet, load_held_out
from actors.collect.sample_metrics import begin_scoring, score
from actors.collect.transcripts import describe_samples
from actors.options.eval_sets import EvalSet, sets_by_name
from actors.rollout.config import SamplingConfig
from actors.rollout.messages import Sample, VersionSpan
from rl_backend.contracts import ConfigError, WeightVersionError
from rl_backend.data.examples import PromptExample
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import LoadedReward, RewardScorer, Score

RUN = SamplingConfig(
    n=8,
    temperature=0.6,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    max_new_tokens=40,
    stop_token_ids=(3,),
    stop_strings=("x",),
)


@pytest.mark.parametrize(
    ("options", "n", "greedy", "changes"),
    [
        ({}, 1, True, {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        ({}, 1, False, {"n": 1}),
        ({}, 4, True, {"n": 4}),
        ({"n": 2}, 1, True, {"n": 2}),
        ({"n": 1}, 4, True, {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        ({"temperature": 0.5}, 1, True, {"n": 1, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        ({"temperature": 0.5, "top_p": 0.8}, 1, True, {"n": 1, "temperature": 0.5, "top_p": 0.8, "top_k": 0, "min_p": 0.0}),
        ({"temperature": 0.5}, 1, False, {"n": 1, "temperature": 0.5}),
        ({"temperature": 0.5}, 4, True, {"n": 4, "temperature": 0.5}),
        ({"temperature": 0}, 1, False, {"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}),
        (
            {"n": 3, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "max_new_tokens": 7, "stop_token_ids": (), "stop_strings": ()},
            1,
            True,
            {"n": 3, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "max_new_tokens": 7, "stop_token_ids": (), "stop_strings": ()},
        ),
    ],
    ids=str,
)
def test_a_set_is_answered_as_it_says_else_as_the_run(options: Any, n: int, greedy: bool, changes: Any) -> None:
    assert EvalSet(path="p", **options).sampling(RUN, n, greedy=greedy) == RUN.replace(log_probs=False, **changes)


def test_more_passes_than_responses_are_refused_when_their_number_is_known() -> None:
    several = EvalSet(path="p", pass_at=(1, 4))
    assert several.sampling(RUN, 4).n == 4
    with pytest.raises(ConfigError, match=r"^EvalSet\.pass_at=4: pass@4 needs at least 4 responses, and n=3; raise"):
        several.sampling(RUN, 3)
    assert EvalSet(path="p", n=4, pass_at=(4,)).pass_at == (4,)
    with pytest.raises(ConfigError, match=r"pass_at=5"):
        EvalSet(path="p", n=4, pass_at=(4, 5))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, []),
        ("a/b.parquet", ["b"]),
        ("a/b.v2.txt", ["b.v2.txt"]),
        ("a/my set (1).csv", ["my-set-1-"]),
        (("x/a.json", "x/b", "org/data:main"), ["a", "b", "data-main"]),
    ],
)
def test_a_path_is_called_by_its_last_part(given: Any, names: list[str]) -> None:
    found = sets_by_name(given)
    assert list(found) == names
    paths = [given] if isinstance(given, str) else list(given or ())
    assert [each.path for each in found.values()] == paths


def test_names_that_metrics_cannot_have_or_have_twice_are_refused() -> None:
    assert list(sets_by_name({"a.b-c_1": EvalSet(path="p")})) == ["a.b-c_1"]
    with pytest.raises(ConfigError, match=r"^eval_dataset='b/c': names metrics; use letters, digits, '\.', '_' and '-'$"):
        sets_by_name({"fine": EvalSet(path="p"), "b/c": EvalSet(path="p")})
    with pytest.raises(ConfigError, match=r"""^eval_dataset='y/a\.csv': two .* 'a'; .* '\{"a": "x/a\.jsonl", "b": """):
        sets_by_name(["x/a.jsonl", "y/a.csv"])


def test_every_set_has_prompts_ends_and_passes_of_its_own() -> None:
    made: list[Any] = []

    def new_ends() -> Any:
        seen: list[str] = []
        made.append(seen)
        return SimpleNamespace(see=seen.append, added_to=lambda how: how.replace(stop_token_ids=(len(seen),)))

    class Read(list[str]):
        note = ""

    def load(path: str, *, held_out: bool, see: Any) -> Any:
        assert held_out
        found = Read(path)
        found.note = f"note of {path}"
        for each in path:
            see(each)
        return found

    sets = {"a": EvalSet(path="xy"), "b": EvalSet(path="z", pass_at=(2, 3), pass_threshold=0.0)}
    sampling = {"b": SamplingConfig(n=3), "a": SamplingConfig(n=4, top_p=0.5)}
    assert load_held_out(sets, sampling, load, new_ends) == [
        HeldOutSet(
            "a", ["x", "y"], SamplingConfig(n=4, top_p=0.5, stop_token_ids=(2,)), (1, 4), 1.0, "held-out set a: note of xy"
        ),
        HeldOutSet("b", ["z"], SamplingConfig(n=3, stop_token_ids=(1,)), (2, 3), 0.0, "held-out set b: note of z"),
    ]
    assert made == [["x", "y"], ["z"]]


def test_a_result_says_how_it_was_sampled() -> None:
    sampling = SamplingConfig(n=2, temperature=0.7, top_p=0.95, top_k=20, min_p=0.05)
    scores = [Score(0.0, failures=("first",)), Score(1.0), Score(1.0, failures=("second", "third")), Score(1.0)]
    result = HeldOutResult(HeldOutSet("s", ["p", "q"], sampling, (1, 2), 0.5), [], scores)
    assert result.describe() == (
        "mean@2 0.750 ± 0.250, pass@1 0.750 ± 0.250, pass@2 1.000 ± 0.000 "
        "(2 prompts, 2 responses each, temperature 0.7, top_p 0.95, top_k 20, min_p 0.05)"
    )
    assert (result.reward, result.rewards, result.failures) == (0.75, [0.0, 1.0, 1.0, 1.0], ["first", "second", "third"])


class Letters:
    def decode(self, ids: Any, *, skip_special_tokens: bool, **_: Any) -> str:
        return "".join(chr(96 + token) for token in ids if not (skip_special_tokens and token == 26))


def sample(ids: list[int], finish: Any, *spans: VersionSpan) -> Sample:
    return Sample(0, 0, [1, 26], ids, [], finish, spans, 0)


def test_rewards_see_text_without_special_tokens_and_lines_have_them() -> None:
    asked: list[Any] = []

    def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        asked.append((data_source, solution_str, ground_truth, extra_info))
        return float(len(solution_str))

    scorer = RewardScorer([LoadedReward(reward, "m:f")])
    prompts = [Prompt(PromptExample(f"p{each}", each, f"d{each}", {"row": each}), [1]) for each in (1, 2)]
    samples = [
        sample([2, 3, 26], "stop", VersionSpan(3, 1), VersionSpan(4, 2)),
        sample([4, 26], "length", VersionSpan(5, 2)),
    ]
    scores = score(samples, prompts, Letters(), scorer)
    begun = begin_scoring(samples, prompts, Letters(), scorer).result()
    assert [each.value for each in scores] == [each.value for each in begun] == [2, 1]
    assert asked[:2] == [("d1", "bc", 1, {"row": 1}), ("d2", "d", 2, {"row": 2})]
    marked = [Score(0.5, info={"format": 1.0}), Score(0.0, failures=("no",))]
    assert describe_samples(samples, prompts, marked, Letters()) == [
        {
            "prompt": "az",
            "response": "bcz",
            "reward": 0.5,
            "ground_truth": 1,
            "version_spans": [[3, 1], [4, 2]],
            "finish_reason": "stop",
            "reward_info": {"format": 1.0},
        },
        {
            "prompt": "az",
            "response": "dz",
            "reward": 0.0,
            "ground_truth": 2,
            "version_spans": [[5, 2]],
            "finish_reason": "length",
            "reward_failures": ["no"],
        },
    ]


def test_reward_functions_do_not_outlast_the_loss_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(load=lambda check: check)
    check: Any = inputs_module.load_scorer(config)
    check()
    monkeypatch.setattr(inputs_module, "cluster_loss", lambda: KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        check()
    monkeypatch.setattr(inputs_module, "raise_if_terminated", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check()


def test_ages_are_steps_since_the_push_of_the_oldest_version() -> None:
    versions = WeightVersions(2)
    for version, step in ((10, 0), (20, 1), (30, 2)):
        versions.pushed(version, step)
    assert [versions.oldest([[30], [30, 10, 20]], step) for step in (1, 2, 3)] == [0, 1, 2]
    with pytest.raises(
        WeightVersionError, match=r"^step 4: a sample's weights are 3 steps old; sampling 2 batches ahead"
    ) as old:
        versions.oldest([[30, 10, 20]], 4)
    assert old.value.details == {"age": 3}
    versions.pushed(40, 3)
    assert versions.state == {"step_of_version": [[20, 1], [30, 2], [40, 3]]}
    again = WeightVersions(2, versions.state)
    again.pushed(50, 3)
    assert again.state == {"step_of_version": [[20, 1], [30, 2], [40, 3], [50, 3]]}


def test_one_sampled_response_is_said_with_its_temperature_and_no_number() -> None:
    result = HeldOutResult(HeldOutSet("s", ["p"], SamplingConfig(temperature=0.5), (1,), -1.0), [], [Score(-1.0)])
    assert result.describe() == "mean@1 -1.000, pass@1 1.000 (1 prompts, temperature 0.5)", "as much as the threshold passes"


def test_a_batch_without_samples_is_of_today() -> None:
    versions = WeightVersions(2)
    versions.pushed(10, 0)
    assert versions.oldest([], 2) == 0
