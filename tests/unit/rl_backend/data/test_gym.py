"""Tasks of reasoning-gym as data sets and as a reward."""

from __future__ import annotations

import pytest

from rl_backend.contracts import ConfigError
from rl_backend.data.datasets import data_files, open_rows
from rl_backend.data.examples import read_examples
from rl_backend.data.gym import compute_score
from rl_backend.data.rewards import RewardConfig
from tests.support.libraries import gym

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


def test_rows_are_the_same_every_time_and_others_by_another_seed() -> None:
    gym()
    first, again, other = (list(open_rows(f"gym:chain_sum?{query}")) for query in ("", "seed=0", "seed=1"))
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
