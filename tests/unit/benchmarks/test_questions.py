"""The forty questions: how first places are scored, and that the recorded answers are about today's tree."""

from __future__ import annotations

import pytest

from benchmarks.questions import Question, questions, score
from benchmarks.report import read_result


def first_places() -> dict[int, str]:
    return {question.number: question.places[0] for question in questions()}


def test_every_question_of_the_page_is_asked_without_its_answer() -> None:
    asked = questions()
    assert [question.number for question in asked] == list(range(1, 41))
    assert all(question.text.endswith("?") and ".py" not in question.text and question.places for question in asked)
    assert asked[15] == Question(
        16, "Where is a checkpoint committed atomically?", ("rl_backend/checkpoint/durable_commit.py",)
    )


def test_any_place_that_the_page_names_is_right_and_no_other() -> None:
    best = first_places()
    assert score(best)["right"] == 40
    second = next(question for question in questions() if len(question.places) > 1)
    assert score({**best, second.number: second.places[1]})["right"] == 40
    answers = score({**best, 3: "rl_backend/runtime/native/optimizer.py"})
    assert answers["right"] == 39 and [each["number"] for each in answers["answers"] if not each["right"]] == [3]


@pytest.mark.parametrize("place", ["rl_backend/no_such_file.py", "rl_backend/runtime"])
def test_a_place_that_is_no_file_of_the_tree_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match=r"without a file of the tree: \[7\]"):
        score({**first_places(), 7: place})


def test_recorded_answers_are_files_of_the_tree_and_scored_as_the_page_says() -> None:
    recorded = read_result("questions")
    given = {answer["number"]: answer["first_place"] for answer in recorded["answers"]}
    assert score(given)["right"] == recorded["right"]
