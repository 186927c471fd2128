"""Does the tree say where things are? First places, chosen from the names of files alone, against the right ones.

``python -m benchmarks.questions --ask FOLDER`` writes there what a reader gets who has not seen the code: ``tree.txt``, the
names of all files, and ``questions.txt``, those of docs/architecture.md without their answers. The reader writes a line
``NUMBER PATH`` for each, the first place to look. ``python -m benchmarks.questions --score FILE --reader WHO`` compares
these with the page's answers and writes ``results/questions.json``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import write_result

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
LEAST_RIGHT = 35


class Question(NamedTuple):
    """Attributes:
    places: files that the page names in its answer, any of which is right.
    """

    number: int
    text: str
    places: tuple[str, ...]


def questions() -> list[Question]:
    """Those of docs/architecture.md."""
    section = PAGE.read_text(encoding="utf-8").split("## Forty questions")[1]
    found = re.findall(r"^(\d+)\. (.*?\?) (.*)$", section, re.MULTILINE)
    return [Question(int(number), text, tuple(re.findall(r"`([\w/]+\.py)`", answer))) for number, text, answer in found]


def score(first: Mapping[int, str]) -> dict[str, Any]:
    """Of a first place for each question; raises where a question has none, or the tree has no such file."""
    asked = questions()
    missing = [question.number for question in asked if not (ROOT / first.get(question.number, "?")).is_file()]
    if missing:
        raise ValueError(f"questions without a file of the tree: {missing}")
    answers = [
        {
            "number": question.number,
            "question": question.text,
            "first_place": first[question.number],
            "right_places": list(question.places),
            "right": first[question.number] in question.places,
        }
        for question in asked
    ]
    return {"right": sum(answer["right"] for answer in answers), "questions": len(answers), "answers": answers}


def tree() -> Sequence[str]:
    """The names of all files that are tracked."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], check=True, capture_output=True, text=True)
    return listed.stdout.splitlines()


def main() -> None:
    """Asks or scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--ask", type=Path, metavar="FOLDER", help="where to write what the reader gets")
    action.add_argument("--score", type=Path, metavar="FILE", help="the reader's lines")
    parser.add_argument("--reader", help="who answered, and what they had seen; goes into the result")
    arguments = parser.parse_args()
    if arguments.ask is not None:
        arguments.ask.mkdir(parents=True, exist_ok=True)
        (arguments.ask / "tree.txt").write_text("\n".join(tree()) + "\n", encoding="utf-8")
        asked = [f"{question.number}. {question.text}\n" for question in questions()]
        (arguments.ask / "questions.txt").write_text("".join(asked), encoding="utf-8")
        return
    if not arguments.reader:
        parser.error("--score needs --reader")
    pairs = [line.split(maxsplit=1) for line in arguments.score.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = score({int(number): path.strip() for number, path in pairs})
    print(f"{found['right']} of {found['questions']} right ({LEAST_RIGHT} asked)")
    for answer in found["answers"]:
        if not answer["right"]:
            print(f"{answer['number']}. {answer['question']} {answer['first_place']}, right: {answer['right_places']}")
    print(write_result("questions", {"reader": arguments.reader, **found}))


if __name__ == "__main__":
    main()
