"""Tasks of reasoning-gym as data sets and as a reward."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rl_backend.contracts import ConfigError
from rl_backend.data.datasets import data_files, open_rows
from rl_backend.data.examples import DataConfig, read_examples
from rl_backend.data.gym import compute_score, score_last_number
from rl_backend.data.prompts import load_prompts, load_tokenizer
from rl_backend.data.rewards import RewardCall, RewardConfig
from tests.support.libraries import gym, smollm2

TASKS = ("chain_sum", "leg_counting", "spell_backward")


@pytest.mark.shows("data: tasks of reasoning-gym are data sets and rewards by their names")
@pytest.mark.parametrize("task", TASKS)
def test_rows_are_those_of_the_task_and_its_scorer_judges_them(task: str) -> None:
    gym()
    from reasoning_gym import create_dataset

    examples = read_examples(f"gym:{task}?size=7&seed=3")
    theirs = create_dataset(task, size=7, seed=3)
    assert len(examples) == 7
    for example, entry in zip(examples, theirs, strict=True):
        assert example.prompt == [{"role": "user", "content": entry["question"]}]
        assert (example.ground_truth, example.data_source) == (entry["answer"], task)

        def score(response: str, example=example) -> float:  # type: ignore[no-untyped-def]
            return compute_score(example.data_source, response, example.ground_truth, example.extra_info)

        assert score(entry["answer"]) == score(f"<answer>no</answer> so <answer>\n{entry['answer']}\n</answer>.") == 1.0
        long = f"It is {entry['answer']}, I think."
        assert score(long) == theirs.score_answer(long, entry) < 1.0


@pytest.mark.parametrize(
    ("response", "last"),
    [
        ("12", "12"),
        ("17 - 5 = 12.", "12"),
        ("It is 12, I think", "12"),
        ("1,012", "1012"),
        ("so -12", "-12"),
        ("17-12", "12"),  # a sign behind a digit is an operator's
        ("12.5 and then", "12.5"),
        ("12 of 3", "3"),
    ],
)
def test_the_last_number_of_a_sentence_is_judged(response: str, last: str) -> None:
    gym()
    for answer in ("12", "-12", "1012", "12.5", "3"):
        entry = {"metadata": {}, "question": ""}
        assert score_last_number("chain_sum", response, answer, entry) == (answer == last)
    assert score_last_number("chain_sum", "no number", "12", {"metadata": {}, "question": ""}) == 0


@pytest.mark.parametrize("task", TASKS)
def test_questions_go_through_the_chat_template_with_the_system_prompt(task: str) -> None:
    gym()
    tokenizer, data = load_tokenizer(str(smollm2())), DataConfig(system_prompt="Answer with the number only.")
    prompts = load_prompts(f"gym:{task}?size=3&seed=3", tokenizer, 256, data)
    for prompt in prompts:
        text = tokenizer.decode(prompt.token_ids)
        question = prompt.example.prompt[0]["content"]  # type: ignore[index]
        assert text.endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        assert text.startswith("<|im_start|>system\nAnswer with the number only.<|im_end|>\n")
    rewards = RewardConfig(functions="rl_backend.data.gym:compute_score").load()
    examples = [prompt.example for prompt in prompts]
    calls = [
        RewardCall(each.data_source, answer, each.ground_truth, each.extra_info, each.prompt)
        for each in examples
        for answer in (each.ground_truth, f"It is {each.ground_truth}, I think.", "no idea")
    ]
    scores = [score.value for score in rewards.score(calls)]
    assert scores[::3] == [1.0] * 3 and max(scores[1::3] + scores[2::3]) < 0.5


def test_rows_are_the_same_every_time_and_others_by_another_seed() -> None:
    gym()
    first, again, other = (
        [(row["prompt"], row["answer"]) for row in open_rows(f"gym:chain_sum?{query}")] for query in ("", "seed=0", "seed=1")
    )
    assert first == again != other and len(first) == 500
    assert all(row["extra_info"]["metadata"]["num_terms"] == 3 for row in open_rows("gym:chain_sum?min_terms=3&max_terms=3"))


def test_options_have_the_types_of_the_task() -> None:
    gym()
    rows = open_rows("gym:spell_backward?size=3&min_word_len=4&max_word_len=4")
    assert [len(row["answer"]) for row in rows] == [4, 4, 4]
    (file,) = data_files("gym:chain_sum?size=3")
    assert (file.name, file.suffix) == ("chain_sum.py", ".py")


def test_what_is_not_there_is_named() -> None:
    gym()
    for source, message in (
        ("gym:chain_summ", "reasoning-gym has no task 'chain_summ'; did you mean chain_sum"),
        ("gym:", "reasoning-gym has no task ''; there are "),
        (
            "gym:chain_sum?terms=3",
            "chain_sum refuses its options: ",
        ),
        ("gym:chain_sum?max_terms=1", "chain_sum refuses its options: max_terms must be >= min_terms"),
        ("gym:chain_sum?max_terms=[1", "chain_sum refuses its options: while parsing"),
        ("gym:chain_sum?max_terms=x", "chain_sum refuses its options: "),
    ):
        with pytest.raises(ConfigError) as refused:
            open_rows(source, field="eval_dataset")
        assert str(refused.value).startswith(f"eval_dataset={source!r}: {message}")


def test_the_reward_is_loaded_by_its_name() -> None:
    gym()
    scorer = RewardConfig(functions="rl_backend.data.gym:compute_score").load()
    assert [each.spec for each in scorer.rewards] == ["rl_backend.data.gym:compute_score"]


@pytest.mark.parametrize(
    "options",
    [{"min_num_decimal_places": 1, "max_num_decimal_places": 2, "size": 4}, {"size": 4}],
    ids=["coarse", "fine"],
)
def test_answers_are_judged_with_the_options_that_made_the_question(options: dict[str, int]) -> None:
    gym()
    from reasoning_gym import create_dataset

    query = "&".join(f"{name}={value}" for name, value in options.items())
    theirs = create_dataset("decimal_arithmetic", seed=0, **options)
    for example, entry in zip(read_examples(f"gym:decimal_arithmetic?{query}"), theirs, strict=True):
        for error in ("0", "0.004", "0.4"):  # the tolerance is one unit of the last decimal place
            response = str(Decimal(entry["answer"]) + Decimal(error))
            found = compute_score(example.data_source, response, example.ground_truth, example.extra_info)
            assert found == theirs.score_answer(response, entry) == (error == "0" or (error == "0.004" and len(options) > 1))


def test_a_plus_in_the_options_is_a_plus() -> None:
    gym()
    from reasoning_gym import create_dataset

    rows = open_rows('gym:basic_arithmetic?size=9&operators=["+","*"]')
    theirs = create_dataset("basic_arithmetic", seed=0, size=9, operators=["+", "*"])
    assert [row["answer"] for row in rows] == [entry["answer"] for entry in theirs]


def test_a_task_is_known_by_its_name_or_by_what_a_row_says_and_the_row_stays_as_it_is() -> None:
    gym()
    assert compute_score("chain_sum", "<answer>12</answer>", "12") == score_last_number("chain_sum", "so 12", "12") == 1.0
    row = {"question": "", "metadata": {}, "gym": "gym:chain_sum?size=3"}
    before = dict(row)
    for score in (compute_score, score_last_number):
        assert score("a file", "12", "12", row) == 1.0 and row == before


def test_an_option_without_a_value_is_refused_and_not_left_out() -> None:
    gym()
    with pytest.raises(ConfigError, match="chain_sum refuses its options: "):
        open_rows("gym:chain_sum?max_terms=")
