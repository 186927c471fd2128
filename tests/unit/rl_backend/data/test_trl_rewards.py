"""Reward functions of TRL: called as its GRPOTrainer calls them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_backend.contracts import BatchError, ConfigError, RewardError
from rl_backend.data.prompts import load_prompts
from rl_backend.data.rewards import RewardCall, RewardConfig, reward_metrics
from rl_backend.data.rewards.function import load_reward
from tests.support.chat_templates import chat_tokenizer
from tests.support.rewards import values

FILE = """
import asyncio, os, time
import torch

def text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]

def right(completions, solution, **kwargs):
    return [1.0 if text(each) == truth else 0.25 for each, truth in zip(completions, solution)]

def tokens(prompts, completions, completion_ids, level=None, **kwargs):
    assert [type(each) for each in prompts] == [type(each) for each in completions], "chat is answered with chat"
    assert len(prompts) == len(completions) == len(completion_ids)
    return torch.tensor([len(ids) + 100 * len(prompts) for ids in completion_ids])

def hard_alone(completions, level, log_metric=None, **kwargs):
    return [None if each < 2 else 8.0 * each for each in level]

def columns(prompts, completions, completion_ids, **kwargs):
    prompts[0] = completions[0] = None
    kwargs["tags"][0].append("mine")
    return [len(kwargs)] * len(completions)

def process(completions):
    return [os.getpid()] * len(completions)

def sleeps(completions):
    time.sleep(600)

def short(completions):
    return [1.0]

def named(completions):
    return {"score": 1.0}

def unordered(completions):
    return {2.0, 1.0, 0.0}

def generates(completions):
    yield 1.0
    raise TimeoutError("the judge is slow")

def fails(completions):
    raise ValueError("no judge")

async def nobody(completions, level):
    await asyncio.sleep(0)
    return [None] * len(completions)

def one_is_no_number(completions):
    return [1.0, "x", 2.0]

def asks(completions, trainer_state):
    return [1.0]

def neither(answer, text):
    return 1.0

def both(completions, solution_str):
    return [1.0]
"""
ROWS = [
    {"prompt": "2+2=", "solution": "4", "level": 1, "tags": ["a"], "completion": "no"},
    {"prompt": "1+1=", "solution": "2", "level": 2, "tags": ["b"], "completion": "no"},
    {"prompt": "3+3=", "solution": "6", "level": 3, "tags": [], "completion": "no"},
]
ANSWERS = ("4", "5", "six")
IDS = ([1], [2, 3], [4, 5, 6, 7])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "of_trl.py"
    path.write_text(FILE)
    return path


def calls(chat: bool = False) -> list[RewardCall]:
    return [
        RewardCall("sums", answer, None, None, prompt(row, chat), ids, row)
        for row, answer, ids in zip(ROWS, ANSWERS, IDS, strict=True)
    ]


def prompt(row: dict[str, Any], chat: bool) -> Any:
    return [{"role": "user", "content": row["prompt"]}] if chat else row["prompt"]


def of_trl(functions: dict[str, Any], *, chat: bool) -> torch.Tensor:
    """What TRL's trainer makes of the same functions and responses: [responses, functions], nan for None."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    rows = [{**row, "prompt": prompt(row, chat)} for row in ROWS]
    completions = [[{"role": "assistant", "content": each}] if chat else each for each in ANSWERS]
    me = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=list(functions.values()),
        reward_processing_classes=[None] * len(functions),
        reward_func_names=list(functions),
        state=SimpleNamespace(global_step=1),
        _log_completion_extra=None,
        _log_metric=None,
        environments=None,
    )
    return trainer.GRPOTrainer._calculate_rewards(me, rows, [row["prompt"] for row in rows], completions, list(IDS))


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("options", [{}, {"workers": 3}, {"processes": True}, {"timeout_seconds": 60.0}], ids=str)
def test_a_function_of_trl_is_called_as_trl_calls_it(
    options: dict[str, Any], chat: bool, file: Path, opened: ExitStack
) -> None:
    weights = {"right": 2.0, "tokens": -0.5}
    functions = {name: {"function": f"{file}:{name}", "weight": weight} for name, weight in weights.items()}
    rewards = opened.enter_context(RewardConfig.model_validate({"functions": functions, **options}).load())
    scores = rewards.score(calls(chat))
    assert values(scores) == [2 - 0.5 * 301, 0.5 - 0.5 * 302, 0.5 - 0.5 * 304]
    assert reward_metrics(scores) == {"reward/right": 0.5, "reward/tokens": pytest.approx(907 / 3)}


@pytest.mark.shows("rewards: functions of TRL are accepted as they are, and give what they give in its GRPOTrainer")
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_scores_are_those_of_trls_trainer(chat: bool, file: Path, opened: ExitStack) -> None:
    weights = {"right": 2.0, "tokens": -0.5, "hard_alone": 1.0}
    functions = {name: {"function": f"{file}:{name}", "weight": weight} for name, weight in weights.items()}
    rewards = opened.enter_context(RewardConfig.model_validate({"functions": functions}).load())
    scores = rewards.score(calls(chat))
    theirs = of_trl({name: load_reward(f"{file}:{name}").function for name in weights}, chat=chat)
    assert values(scores) == pytest.approx((theirs * torch.tensor(list(weights.values()))).nansum(dim=1).tolist())
    assert reward_metrics(scores) == pytest.approx(
        {f"reward/{name}": mean for name, mean in zip(weights, theirs.nanmean(dim=0).tolist(), strict=True)}
    )


@pytest.mark.shows("rewards: where a function of TRL returns None, the others alone judge the response")
def test_trls_functions_that_judge_some_responses_leave_the_others_alone(file: Path, opened: ExitStack) -> None:
    functions = [f"{file}:{name}" for name in ("right", "hard_alone")]
    scores = opened.enter_context(RewardConfig.model_validate({"functions": functions}).load()).score(calls())
    assert values(scores) == [1, 0.25 + 16, 0.25 + 24]
    assert reward_metrics(scores)["reward/hard_alone"] == 20, "the mean over the responses that it judged"
    assert scores[0].info == {"right": {"score": 1.0}}
    stops = opened.enter_context(RewardConfig(functions=f"{file}:hard_alone").load())
    with pytest.raises(RewardError, match=r"judged nothing, and no other did.*prompt '2\+2='"):
        stops.score(calls())
    drops = opened.enter_context(RewardConfig(functions=f"{file}:nobody", on_failure="drop").load())
    assert [score.dropped for score in drops.score(calls())] == [True] * 3


def test_trls_signature_and_verls_can_be_mixed(file: Path, opened: ExitStack) -> None:
    more = "\ndef length(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
    file.write_text(FILE + more)
    functions = [f"{file}:{name}" for name in ("length", "right")]
    rewards = opened.enter_context(RewardConfig.model_validate({"functions": functions}).load())
    assert values(rewards.score(calls())) == [2, 1.25, 3.25]
    assert rewards.needs_ground_truth and rewards.columns == ["solution"]
    assert rewards.score([]) == []


@pytest.mark.parametrize("options", [{}, {"processes": True}], ids=str)
def test_a_function_of_trl_is_given_the_columns_as_copies(options: dict[str, Any], file: Path, opened: ExitStack) -> None:
    rewards = opened.enter_context(RewardConfig.model_validate({"functions": f"{file}:columns", **options}).load())
    for _ in range(2):
        assert values(rewards.score(calls())) == [3] * 3, "solution, level and tags"
    assert ROWS[0]["tags"] == ["a"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("short", {}, "returned 1 numbers for 3 responses; have it return a list with a number for each, on prompt"),
        ("named", {}, "returned a dict for 3 responses"),
        ("unordered", {}, "returned a set for 3 responses"),
        ("generates", {}, "raised TimeoutError: the judge is slow"),
        ("generates", {"workers": 2}, "raised TimeoutError: the judge is slow"),
        ("fails", {}, "raised ValueError: no judge"),
        pytest.param("fails", {"processes": True}, "raised ValueError: no judge", marks=pytest.mark.long),
        pytest.param(
            "sleeps",
            {"processes": True, "timeout_seconds": 0.5},
            "took longer than reward_timeout_seconds=0.5",
            marks=pytest.mark.long,
        ),
        ("sleeps", {"timeout_seconds": 0.2}, "took longer than reward_timeout_seconds=0.2"),
    ],
)
def test_a_failed_call_of_a_batch_is_a_failure_of_each_response(
    name: str, options: dict[str, Any], message: str, file: Path, opened: ExitStack
) -> None:
    given = {"functions": f"{file}:{name}", **options}
    with pytest.raises(RewardError, match=re.escape(message)):
        opened.enter_context(RewardConfig.model_validate(given).load()).score(calls())
    rewards = opened.enter_context(RewardConfig.model_validate({**given, "on_failure": "zero"}).load())
    scores = rewards.score(calls())
    assert values(scores) == [0, 0, 0]
    assert all(message.partition(", on")[0] in score.failures[0] for score in scores)


def test_one_response_without_a_number_fails_alone(file: Path, opened: ExitStack) -> None:
    given = {"functions": f"{file}:one_is_no_number", "on_failure": "zero"}
    scores = opened.enter_context(RewardConfig.model_validate(given).load()).score(calls())
    assert values(scores) == [1, 0, 2]
    assert [len(score.failures) for score in scores] == [0, 1, 0]


@pytest.mark.shows("rewards: any other signature is refused with both that are accepted, before anything starts")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("neither", r"must take verl's \(data_source, .*\) or TRL's \(prompts, completions, .*\): missing a required"),
        ("asks", "takes trainer_state; a run gives prompts, completions, completion_ids and the data set's other columns: "),
    ],
)
def test_another_signature_is_refused_with_both(name: str, message: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardConfig(functions=f"{file}:{name}").load()


def test_columns_that_a_function_takes_must_be_in_each_row(file: Path, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text('{"prompt": "2+2=", "solution": "4"}\n{"prompt": "1+1=", "answer": "2"}\n')
    rewards = RewardConfig(functions=f"{file}:right").load()
    assert not rewards.needs_ground_truth
    required = {"require_answer": rewards.needs_ground_truth, "require_columns": rewards.columns}
    with pytest.raises(BatchError, match=r"line 2: the reward function takes solution; the row has \['answer', 'prompt'\]"):
        load_prompts(data, chat_tokenizer(None), 16, **required)
    data.write_text('{"prompt": "2+2=", "solution": "4"}\n')
    prompts = load_prompts(data, chat_tokenizer(None), 16, **required)
    assert prompts[0].example.columns == {"prompt": "2+2=", "solution": "4"}
    assert RewardConfig(functions=f"{file}:both").load().columns == ["solution_str"]


def test_trls_own_functions_are_accepted(opened: ExitStack) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    reward = opened.enter_context(RewardConfig(functions="trl.rewards:think_format_reward").load())
    texts = ("<think>\nso\n</think>\n4", "4")
    asked = [{"role": "user", "content": "2+2?"}]
    assert values(reward.score([RewardCall("s", each, None, None, asked) for each in texts])) == [1, 0]
    assert load_reward("trl.rewards:accuracy_reward").columns == ["solution"]
