"""Tasks of reasoning-gym as data and as a reward: ``gym:chain_sum?max_terms=3&size=400``."""

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from rl_backend.contracts import ConfigError
from rl_backend.data.rows import Row, Rows

PREFIX = "gym:"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")


class GymRows(Rows):
    """Questions of one task, made by their seed when they are read."""

    def __init__(self, source: str, task: str, questions: Any) -> None:
        super().__init__(source, task)
        self._questions = questions

    def __len__(self) -> int:
        return len(self._questions)

    def read(self, index: int) -> Row:
        entry = self._questions[index]
        return {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "answer": entry["answer"],
            "extra_info": {"question": entry["question"], "metadata": entry["metadata"], "gym": self.source},
        }

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        return float(self._questions.score_answer(answer, entry))


def is_gym(source: Path | str) -> bool:
    return str(source).startswith(PREFIX)


def open_gym(source: str, *, field: str = "dataset") -> GymRows:
    """Opens ``gym:TASK?OPTION=VALUE&...``, with the options of the task's own configuration.

    ``seed`` is 0 and ``size`` 500 where they are left out: the same text names the same rows. Raises :class:`ConfigError`
    where there is no such task, or it refuses an option; ``field`` names it.
    """
    task, _, query = source.removeprefix(PREFIX).partition("?")
    task_type, config_type = _registered(source, task, field)
    try:
        # A plus is one here: tasks have options that are lists of operators.
        pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
        given = {name: yaml.safe_load(value) for name, value in pairs}
        config = config_type(**{"seed": 0, "size": 500, **given})
        config.validate()
        return GymRows(source, task, task_type(config))
    except (AssertionError, TypeError, ValueError, yaml.YAMLError) as error:  # what its configurations raise
        known = ", ".join(sorted(each.name for each in fields(config_type)))
        # YAML's errors have several lines.
        problem = f"{task} refuses its options: {' '.join(str(error).split())}; it has {known}"
        raise ConfigError.of(field, source, problem) from error


def gym_file(source: str, *, field: str = "dataset") -> Path:
    """The source file of a task, which decides with its options what the rows are. Errors as of :func:`open_gym`."""
    task = source.removeprefix(PREFIX).partition("?")[0]
    return Path(inspect.getfile(_registered(source, task, field)[0]))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """The score of the task's own scorer, from 0 to 1: ``--reward rl_backend.data.gym:compute_score``.

    What stands between the last ``<answer>`` and ``</answer>`` is judged, or the whole response where there are none. Most
    scorers give a part of 1 to a response that contains the answer: the shorter the response, the more.
    """
    found = _ANSWER.findall(solution_str)
    return _score(data_source, (found[-1] if found else solution_str).strip(), ground_truth, extra_info)


def score_last_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 if the task's own scorer gives 1 to the last number of the response, else 0.

    ``--reward rl_backend.data.gym:score_last_number`` suits tasks that ask for a number and models that answer
    in sentences.
    """
    numbers = _NUMBER.findall(solution_str)
    return float(bool(numbers) and _score(data_source, numbers[-1].replace(",", ""), ground_truth, extra_info) == 1)


def _score(task: str, answer: str, ground_truth: Any, extra_info: Mapping[str, Any] | None) -> float:
    entry = {"answer": ground_truth, **(extra_info or {})}
    return _opened(entry.pop("gym", PREFIX + task)).score(answer, entry)


@lru_cache(maxsize=64)
def _opened(source: str) -> GymRows:
    # With the options of the rows: scorers read limits and tolerances from them.
    return open_gym(source, field="data_source")


def _registered(source: str, task: str, field: str) -> tuple[Any, Any]:
    tasks = importlib.import_module("reasoning_gym.factory").DATASETS
    if task not in tasks:
        near = get_close_matches(task, tasks, n=3)
        advice = f"did you mean {' or '.join(near)}?" if near else f"there are {len(tasks)}, such as chain_sum"
        raise ConfigError.of(field, source, f"reasoning-gym has no task {task!r}; {advice}")
    return tasks[task]  # type: ignore[no-any-return]
