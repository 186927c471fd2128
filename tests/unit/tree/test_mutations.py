"""The list of deliberate faults is applicable: each stands for one place, and the tests named for it exist."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import results
from tests.mutations.check import problems
from tests.mutations.child import Child, Outcome
from tests.mutations.copies import ROOT, applied
from tests.mutations.fault import NAMED, Fault, all_faults

FAULTS = [fault for faults in all_faults().values() for fault in faults]


def test_there_are_enough_faults_and_each_can_be_tried() -> None:
    assert len(FAULTS) >= 400
    assert len(all_faults()[NAMED]) == 14
    assert problems(FAULTS) == []


def test_a_fault_that_cannot_be_tried_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    (tmp_path / "test_code.py").write_text("def test_a(): ...\n")
    good = Fault("good", "code.py", "a = 1", "a = 2", ("test_code.py::test_a[x]",), "why")
    assert problems([good], tmp_path) == []
    cases: list[tuple[dict[str, Any], str]] = [
        ({"old": " = 1"}, "good: the old text stands 2 times in code.py; it must stand there once"),
        ({"file": "none.py"}, "good: FileNotFoundError"),
        ({"new": "a ="}, "good: SyntaxError: invalid syntax"),
        ({"new": "a = 1"}, "good: it changes nothing"),
        ({"tests": ("test_code.py::test_b",)}, "good: there is no test test_code.py::test_b"),
        ({"tests": ("none.py::test_a",)}, "good: there is no test none.py::test_a"),
    ]
    for changes, problem in cases:
        (found,) = problems([good._replace(**changes)], tmp_path)
        assert found.startswith(problem)
    assert problems([good, good], tmp_path) == ["good: two faults have this name"]


def test_a_text_that_stands_twice_or_not_at_all_is_refused() -> None:
    for text in ("", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match="must stand there once"):
            Fault("name", "file.py", "a = 1\n", "a = 2\n", (), "").applied(text)


def test_the_results_count_what_is_listed_and_leave_out_what_is_stale(tmp_path: Path) -> None:
    areas = {NAMED: FAULTS[:2], "others": FAULTS[2:4]}
    file = tmp_path / "mutations.json"
    file.write_text(json.dumps({"faults": {}, "without_a_fault": {}}))
    for fault, result in zip(FAULTS, ({"killed_by": "t"}, {"survived": "why"}, {"killed_by": "t"}), strict=False):
        results.record(fault.name, {**result, "digest": fault.digest(ROOT)}, areas, file)
    results.record(FAULTS[3].name, {"killed_by": "t", "digest": "of another text"}, areas, file)
    assert json.loads(file.read_text())["killed"] == 3
    results.tidy(areas, file)
    found = json.loads(file.read_text())
    assert (found["total"], found["killed"], found["named"]) == (4, 2, {"total": 2, "killed": 1})
    assert found["survived"] == {FAULTS[1].name: "why"} and found["not_run"] == [FAULTS[3].name]


def run(copy: Path, test: str, limit: float = 60.0) -> Outcome:
    child = Child(copy, [test], copy / "log", limit=limit, stop=True)
    while (outcome := child.outcome()) is None:
        time.sleep(0.02)
    return outcome


def test_a_fault_is_tried_in_its_copy_and_undone(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "rl_backend").mkdir()
    (tmp_path / "rl_backend" / "__init__.py").write_text("import time\n\ndef value():\n    return 1\n")
    (tmp_path / "tests" / "test_it.py").write_text("import rl_backend\n\ndef test_it():\n    assert rl_backend.value() == 1")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["long: takes minutes"]\n')
    test = "tests/test_it.py::test_it"
    wrong, interrupting, slow, broken = (
        Fault("name", "rl_backend/__init__.py", "return 1", new, (test,), "")
        for new in ("return 2", "raise KeyboardInterrupt", "time.sleep(60)", "return 1\n\nimport nothing_of_this_name")
    )
    assert run(tmp_path, test).kind == "passed"
    for fault in (wrong, interrupting):
        with applied(fault, tmp_path):
            outcome = run(tmp_path, test)
        assert (outcome.kind, outcome.failed) == ("failed", [test])
    with applied(slow, tmp_path):
        assert run(tmp_path, test, limit=3.0).kind == "time-out"
    with applied(broken, tmp_path):
        assert run(tmp_path, test).kind == "broken"
    assert run(tmp_path, f"{test}_that_is_not_there").kind == "broken"
    assert run(tmp_path, test).kind == "passed"
