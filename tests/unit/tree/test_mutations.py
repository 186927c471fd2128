"""The list of deliberate faults is applicable: each stands for one place, and the tests named for it exist."""

from __future__ import annotations

import ast
import json
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.mutations import results
from tests.mutations.child import Child, Outcome
from tests.mutations.copies import ROOT, applied
from tests.mutations.fault import NAMED, Fault, all_faults, file_of

FAULTS = [fault for faults in all_faults().values() for fault in faults]


def test_there_are_enough_faults_and_no_two_share_a_name() -> None:
    assert len(FAULTS) >= 80
    assert len(all_faults()[NAMED]) == 14
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_every_fault_changes_one_place_and_leaves_a_file_that_python_reads() -> None:
    for fault in FAULTS:
        assert fault.old != fault.new and fault.tests and fault.why, fault.name
        changed = fault.applied((ROOT / fault.file).read_text())
        if fault.file.endswith(".py"):
            ast.parse(changed, fault.file)


def test_every_test_that_is_named_exists() -> None:
    found: dict[str, set[str]] = {}
    for fault in FAULTS:
        for test in fault.tests:
            file = file_of(test)
            if file not in found:
                tree = ast.parse((ROOT / file).read_text())
                found[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert test.partition("::")[2].partition("[")[0] in found[file], f"{fault.name}: {test}"


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
    (tmp_path / "rl_backend" / "__init__.py").write_text("import time\nVALUE = 1\n")
    (tmp_path / "tests" / "test_it.py").write_text("import rl_backend\n\ndef test_it():\n    assert rl_backend.VALUE == 1\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["long: takes minutes"]\n')
    test = "tests/test_it.py::test_it"
    wrong, slow, broken = (
        Fault("name", "rl_backend/__init__.py", "VALUE = 1", new, (test,), "")
        for new in ("VALUE = 2", "time.sleep(60)", "import nothing_of_this_name")
    )
    assert run(tmp_path, test).kind == "passed"
    with applied(wrong, tmp_path):
        outcome = run(tmp_path, test)
    assert (outcome.kind, outcome.failed) == ("failed", [test])
    with applied(slow, tmp_path):
        assert run(tmp_path, test, limit=3.0).kind == "time-out"
    with applied(broken, tmp_path):
        assert run(tmp_path, test).kind == "broken"
    assert run(tmp_path, f"{test}_that_is_not_there").kind == "broken"
    assert run(tmp_path, test).kind == "passed"
