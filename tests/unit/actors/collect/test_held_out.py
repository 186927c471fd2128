"""Held-out sets: how they are named and answered, and what they come to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors import Sample
from actors.collect.held_out import HeldOutSet, answer
from actors.collect.inputs import load_inputs
from actors.folder.folder import RunFolder
from actors.folder.identity import saved_facts
from actors.options.eval_sets import EvalSet
from actors.rollout.config import SamplingConfig
from actors.rollout.messages import VersionSpan, sample_seeds
from actors.run import EvalConfig, RunResult, evaluate, parse_config
from actors.watch.console import SHOWN
from examples.demo.task import write_task
from examples.grpo import GRPOConfig
from rl_backend.checkpoint.hf_reader import SINGLE_FILE
from rl_backend.contracts import BatchError, CheckpointError, ConfigError
from rl_backend.data import prompts as prompts_module
from rl_backend.data.examples import PromptExample
from rl_backend.data.prompts import Prompt, load_tokenizer
from rl_backend.data.rewards import LoadedReward, RewardScorer
from rl_backend.lab.text import json_text
from tests.support.page import read_page
from tests.support.submitted import Submitted

REQUIRED = ["--model", "m", "--dataset", "d", "--reward", "r", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=0)
    return folder


def read(*flags: str) -> GRPOConfig:
    return parse_config(GRPOConfig, "", [*REQUIRED, *flags])


def test_sets_are_a_path_several_or_a_mapping(tmp_path: Path) -> None:
    assert read().eval_sets == {}
    one = read("--eval-dataset", "a/held.out.jsonl")
    assert one.eval_dataset == "a/held.out.jsonl"
    assert one.eval_sets == {"held.out": EvalSet(path="a/held.out.jsonl")}
    assert list(read("--eval-dataset", "a/x.jsonl", "--eval-dataset", "openai/gsm8k:main:test").eval_sets) == [
        "x",
        "gsm8k-main-test",
    ]
    options = {"math": {"path": "m.jsonl", "n": 8, "pass_at": [1, 4], "temperature": 0.7}, "easy": "e.jsonl"}
    named = read("--eval-dataset", json.dumps(options))
    assert named.eval_sets == {
        "math": EvalSet(path="m.jsonl", n=8, pass_at=(1, 4), temperature=0.7),
        "easy": EvalSet(path="e.jsonl"),
    }
    (tmp_path / "config.json").write_text(named.model_dump_json())
    assert read("--config", str(tmp_path / "config.json")) == named
    assert read("--config", str(tmp_path / "config.json"), "--eval-dataset", "x").eval_dataset == "x"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a/x.jsonl", "b/x.jsonl"], r"b/x\.jsonl': two sets would be called 'x'; name them"),
        (["{"], "is neither a path nor JSON"),
        (['{"a b": "x"}'], "'a b': names metrics; use letters"),
        (['{"a": {"pth": "x"}}'], r"EvalSet\.pth='x': unknown field"),
        (
            ['{"a": {"path": "x", "n": 2, "pass_at": [4]}}'],
            r"EvalSet\.pass_at=4: pass@4 needs at least 4 responses, and n=2",
        ),
        (['{"a": {"path": "x", "pass_at": [2]}}'], r"EvalSet\.pass_at=2: .* and n=1"),
        (['{"a": {"path": "x", "n": 2, "temperature": 0}}'], r"EvalSet\.n=2: greedy responses are all the same"),
        (['{"a": {"path": "x", "top_p": 0.5}}'], r"EvalSet\.top_p=0\.5: temperature=0 takes the likeliest token"),
    ],
)
def test_sets_that_cannot_work_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*(flag for path in given for flag in ("--eval-dataset", path)))


def test_one_response_is_greedy_and_several_are_sampled_as_in_training() -> None:
    of_training = ["--top-p", "0.9", "--min-p", "0.1", "--temperature", "0.6", "--stop-strings", "x"]
    sets = {"one": "o", "several": {"path": "s", "n": 4}, "own": {"path": "w", "temperature": 1.0, "max_new_tokens": 600}}
    config = read(*of_training, "--eval-dataset", json.dumps(sets))
    one, several, own = config.eval_sampling.values()
    common = {"max_new_tokens": 512, "stop_strings": ("x",), "log_probs": False}
    assert one == SamplingConfig(temperature=0.0, **common)
    assert several == SamplingConfig(n=4, temperature=0.6, top_p=0.9, min_p=0.1, **common)
    assert own == SamplingConfig(temperature=1.0, **{**common, "max_new_tokens": 600})
    assert config.rollout.max_model_len == 512 + 600
    with pytest.raises(ConfigError, match=r"--rollout\.max_model_len=1100: a held-out set needs 1112"):
        read("--eval-dataset", json.dumps(sets), "--rollout.max_model_len", "1100")
    with_strings = read("--eval-dataset", '{"a": {"path": "x", "stop_strings": ["y"]}}')
    assert with_strings.rollout.load_tokenizer


class Engines:
    """Answers with the number of the response as its only token, and notes how it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[SamplingConfig, Sequence[int] | None]] = []

    def submit(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seeds: Sequence[int] | None, adapter: None
    ) -> Submitted:
        self.asked.append((sampling, seeds))
        samples = [
            Sample(index, number, list(prompt), [number], [], "stop", (VersionSpan(3, 1),), 0)
            for index, prompt in enumerate(prompts)
            for number in range(sampling.n)
        ]
        return Submitted(len(prompts), lambda: samples)


class Digits:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def below(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """2 for the responses whose number is below the answer, of which there are as many as it says."""
    return 2.0 if int(solution_str) < ground_truth else 0.5


SCORER = RewardScorer([LoadedReward(below, "below")])


def set_of(answers: Sequence[int], n: int, *, name: str = "a", threshold: float = 1.0) -> HeldOutSet:
    prompts = [Prompt(PromptExample(f"p{index}", count, "d"), [index]) for index, count in enumerate(answers)]
    sampling = SamplingConfig(n=n, temperature=1.0 if n > 1 else 0.0, log_probs=False)
    return HeldOutSet(name, prompts, sampling, tuple(dict.fromkeys((1, n))), threshold)


@pytest.mark.shows("evaluation: several held-out sets with their own sampling, mean@n and pass@k with standard errors")
def test_results_are_means_over_prompts_with_their_errors() -> None:
    engines: Any = Engines()
    sets = [set_of([0, 1, 4], 4), set_of([1], 1, name="b"), set_of([1, 0], 1, name="c", threshold=0.5)]
    first, second, third = answer(engines, sets, Digits(), SCORER, seed=5)
    assert first.reward == (4 * 0.5 + (2 + 3 * 0.5) + 4 * 2) / 12
    assert first.metrics == pytest.approx(
        {
            "eval/a/mean@4": (0.5 + 0.875 + 2) / 3,
            "eval/a/mean@4_stderr": 0.4507,
            "eval/a/pass@1": (0 + 0.25 + 1) / 3,
            "eval/a/pass@1_stderr": 0.3005,
            "eval/a/pass@4": 2 / 3,
            "eval/a/pass@4_stderr": 1 / 3,
        },
        abs=1e-4,
    )
    assert second.metrics == {"eval/b/mean@1": 2.0, "eval/b/pass@1": 1.0}
    assert third.metrics["eval/c/pass@1"] == 1.0, "0.5 is enough for its threshold"
    assert first.describe().startswith("mean@4 1.125 ± 0.451, pass@1 0.417 ± 0.300, pass@4 0.667 ± 0.333 (3 prompts, 4 ")
    assert second.describe() == "mean@1 2.000, pass@1 1.000 (1 prompts, greedy)"
    lines = first.lines(Digits())
    assert [(line["set"], line["prompt"], line["response"]) for line in lines[3:5]] == [("a", "0", "3"), ("a", "1", "0")]
    assert len(lines) == 12


def test_a_ground_truth_that_json_has_no_form_for_is_given_as_it_is_and_written_as_text() -> None:
    truths = [Decimal("0.50"), date(2024, 5, 17), b"4", {"at": datetime(2024, 5, 17, 8), "in": [3, "m"]}, np.int64(3), "7"]
    given: list[Any] = []

    def seen(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        given.append(ground_truth)
        return 1.0

    prompts = [Prompt(PromptExample("p", truth, "d"), [1]) for truth in truths]
    held_out = replace(set_of([0], 1), prompts=prompts)
    (result,) = answer(Engines(), [held_out], Digits(), RewardScorer([LoadedReward(seen, "seen")]), seed=0)  # type: ignore[arg-type]
    assert given == truths
    written = [json.loads(json_text(line))["ground_truth"] for line in result.lines(Digits())]
    assert written == [
        "Decimal('0.50')",
        "datetime.date(2024, 5, 17)",
        "b'4'",
        {"at": "datetime.datetime(2024, 5, 17, 8, 0)", "in": [3, "m"]},
        3,
        "7",
    ]


@pytest.mark.shows("evaluation: a mean reward is called a reward, whatever its size, and never an accuracy")
def test_a_mean_reward_is_no_accuracy() -> None:
    def debt(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        return -9.89

    (result,) = answer(Engines(), [set_of([1], 1)], Digits(), RewardScorer([LoadedReward(debt, "debt")]), seed=0)  # type: ignore[arg-type]
    assert result.describe() == "mean@1 -9.890, pass@1 0.000 (1 prompts, greedy)"
    labels = [label for label, _ in SHOWN.values()]
    fields = RunResult.__dataclass_fields__
    assert not any("accuracy" in word for word in (*SHOWN, *labels, *fields, *result.metrics))


def test_seeds_are_the_same_at_every_step_differ_between_sets_and_greedy_answers_have_none() -> None:
    engines: Any = Engines()
    sets = [set_of([0, 1], 2), set_of([0, 1], 2, name="b"), set_of([0], 1, name="c")]
    for _ in range(2):
        answer(engines, sets, Digits(), SCORER, seed=5)
    seeds = [given for _, given in engines.asked]
    assert seeds[:3] == seeds[3:] and seeds[2] is None
    drawn = {*seeds[0], *seeds[1]}  # type: ignore[misc]
    assert len(drawn) == 8
    assert not drawn & {seed for step in range(1, 4) for seed in sample_seeds(5, step, 2, 2)}, "those of training steps"


def test_inputs_have_every_set_with_the_tokens_that_end_a_response(task: Path) -> None:
    sets = {"a": str(task / "held_out.jsonl"), "b": {"path": str(task / "validation.jsonl"), "n": 2, "stop_token_ids": [5]}}
    options = {"dataset": str(task / "train.jsonl"), "reward": "examples.demo.task:compute_score", "dtype": "float32"}
    config = GRPOConfig(model=str(task / "model"), eval_dataset=sets, **options)
    first, second = load_inputs(config).held_out
    end = load_tokenizer(str(task / "model")).eos_token_id
    assert (first.name, first.sampling.stop_token_ids, first.pass_at) == ("a", (end,), (1,))
    assert (second.name, second.sampling.stop_token_ids, second.pass_at) == ("b", (5, end), (1, 2))
    contents = saved_facts(config)["contents"]["eval_dataset"]
    assert set(contents) == {"a", "b"} and contents["a"] != contents["b"]
    one = saved_facts(config.replace(eval_dataset=sets["a"]))["contents"]["eval_dataset"]
    assert one == contents["a"], "as before for a path alone"


def test_a_run_that_continues_has_the_batches_of_a_whole_one_and_makes_none_before(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"model": str(task / "model"), "dataset": str(task / "train.jsonl")}
    config = GRPOConfig(**files, reward="examples.demo.task:compute_score", dtype="float32", prompts_per_step=8)
    whole, later = load_inputs(config).batches, load_inputs(config, 7).batches
    made: list[object] = []
    monkeypatch.setattr(prompts_module, "cut_prompt", lambda ids, *_: made.append(ids) or ids)
    found = list(islice(later, 3))
    assert len(made) == 24 and found == list(islice(whole, 7, 10))


def test_the_report_has_a_chart_for_each_set(tmp_path: Path) -> None:
    with RunFolder(tmp_path, EvalSet(path="x")) as folder:
        for step, value in ((0, 0.25), (2, 0.75)):
            metrics = {"eval/a/mean@4": value, "eval/a/mean@4_stderr": 0.1, "eval/a/pass@4": 1.0, "eval/b/mean@1": 0.5}
            folder.log_start(metrics) if step == 0 else folder.log(step, metrics)
    page = read_page(tmp_path / "report.html")
    titles = [figure.one("h3").text for figure in page.all("figure")]
    assert [title.partition("mean over")[0] for title in titles] == ["Held-out set a", "Held-out set b"]
    curves = json.loads(page.one("figure", id="chart-eval/a/mean@4").one("svg").attributes["data-hover"])["series"]
    assert [curve["name"] for curve in curves] == ["eval/a/mean@4", "eval/a/pass@4"]
    assert "_stderr" not in "".join(titles)


def of_evaluation(*flags: str) -> EvalConfig:
    return parse_config(EvalConfig, "", ["--model", "m", "--reward", "r", "--dtype", "float32", *flags])


def test_an_evaluation_alone_has_options_for_all_sets_that_each_may_replace() -> None:
    config = of_evaluation("--eval-dataset", "x.jsonl", "--samples-per-prompt", "8", "--pass-at", "2,8", "--top-k", "9")
    assert config.eval_sets["x"].pass_at == (2, 8)
    sampled = SamplingConfig(n=8, temperature=1.0, top_k=9, max_new_tokens=512, log_probs=False)
    assert config.eval_sampling == {"x": sampled}
    assert EvalConfig.model_validate_json(config.model_dump_json()) == config
    assert of_evaluation("--eval-dataset", "x").eval_sampling["x"].temperature == 0
    assert of_evaluation("--eval-dataset", "x", "--temperature", "0.5").eval_sampling["x"].temperature == 0.5
    sets = '{"a": {"path": "x", "n": 4, "pass_threshold": 0.5}, "b": "y"}'
    mixed = of_evaluation("--eval-dataset", sets, "--pass-threshold", "2")
    assert [(each.n, each.temperature) for each in mixed.eval_sampling.values()] == [(4, 1.0), (1, 0.0)]
    assert [each.pass_threshold for each in mixed.eval_sets.values()] == [0.5, 2.0]
    one = of_evaluation("--eval-dataset", '{"a": {"path": "x", "n": 1}, "b": "y"}', "--samples-per-prompt", "8")
    assert [(each.n, each.temperature) for each in one.eval_sampling.values()] == [(1, 0.0), (8, 1.0)]
    own = '{"x": {"path": "x", "n": 1, "temperature": 0.7}, "y": {"path": "y", "n": 1}}'
    one, greedy = of_evaluation("--eval-dataset", own, "--samples-per-prompt", "8", "--top-p", "0.9").eval_sampling.values()
    assert (one.temperature, one.top_p, greedy.temperature, greedy.top_p) == (0.7, 0.9, 0.0, 1.0)
    with pytest.raises(ConfigError, match="--eval-dataset"):
        of_evaluation()
    with pytest.raises(ConfigError, match=r"^--reward: required field is missing$"):
        parse_config(EvalConfig, "", ["--model", "m", "--eval-dataset", "x"])
    with pytest.raises(ConfigError, match=r"--rollout\.max_model_len=20: must hold .* 1024; leave it out"):
        of_evaluation("--eval-dataset", "x", "--rollout.max_model_len", "20")


def test_an_evaluation_that_cannot_work_is_refused_before_anything_starts(task: Path, tmp_path: Path) -> None:
    options = {"eval_dataset": str(task / "held_out.jsonl"), "reward": "examples.demo.task:compute_score"}
    (tmp_path / "run").mkdir()
    for name in ("config.json", "run.json", "evaluation.json"):
        (tmp_path / "run" / name).write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    shutil.copytree(task / "model", tmp_path / "half")
    os.truncate(tmp_path / "half" / SINGLE_FILE, (task / "model" / SINGLE_FILE).stat().st_size // 2)
    (tmp_path / "file").touch()
    for changes, message in (
        # The folder comes before the model, which may take an hour to fetch.
        ({"out": str(tmp_path / "file" / "out"), "model": "nowhere"}, r"^EvalConfig\.out='\S+': cannot be written: "),
        ({"model": str(tmp_path / "half"), "out": str(tmp_path / "new" / "out")}, r"^EvalConfig\.model='\S+': \S+ is trunc"),
        ({"model": str(tmp_path / "run")}, "is a run's folder; give .*run/model"),
        ({"model": str(tmp_path / "adapter")}, "has adapters alone"),
        ({"out": str(tmp_path / "run")}, r"out=.* has evaluation\.json already"),
        ({"reward": "nowhere:f"}, "cannot import nowhere"),
        (
            {"rollout": {"tensor_parallel": 3}},
            r"tensor_parallel=3: does not divide num_attention_heads=4 .* use 2 or 4",
        ),
        ({"eval_dataset": "nothing.jsonl"}, "no such file"),
        ({"max_prompt_tokens": 1}, "max_prompt_tokens=1"),
    ):
        with pytest.raises((BatchError, CheckpointError, ConfigError), match=message):
            evaluate(EvalConfig(**{"model": str(task / "model"), **options, **changes}))
    assert not ray.is_initialized()
    assert not (tmp_path / "new").exists()
