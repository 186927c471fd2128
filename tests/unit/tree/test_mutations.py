"""The list of deliberate faults is applicable: each stands for one place, and the tests named for it exist."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import results
from tests.mutations.check import problems
from tests.mutations.child import Child, Outcome
from tests.mutations.copies import ROOT, applied
from tests.mutations.fault import NAMED, Fault, all_faults
from tests.mutations.places import find_place, find_test

FAULTS = [fault for faults in all_faults().values() for fault in faults]

CODE = '''
"""Sums."""

LIMIT = 3


def total(values, start=0):
    """The sum."""
    found = start  # kept
    for value in values:
        if value < LIMIT:
            found += value
        elif value == LIMIT or value is None:
            found -= (
                value
            )
    return call(found, "é",
        limit=LIMIT,
        values=[1, 2, 3],
    )


class Sum:
    limit: int = 3

    @property
    def value(self):
        try:
            return {"a": 1, **self.rest, "b": 2}
        except (KeyError, ValueError) as error:
            raise SystemExit(1) from error
'''


def tree_of(folder: Path, code: str = CODE, module: str = "rl_backend/sums.py") -> Path:
    (folder / module).parent.mkdir(parents=True, exist_ok=True)
    (folder / module).write_text(code)
    return folder


def test_there_are_enough_faults_and_each_can_be_tried() -> None:
    assert len(FAULTS) >= 650
    assert len(all_faults()[NAMED]) == 14
    assert problems(FAULTS) == []


@pytest.mark.parametrize(
    ("where", "old", "new", "was", "now"),
    [
        ("total", "found = start", "found = 0", "found = start  #", "found = 0  #"),
        ("total", "found -= value", "pass", "found -= (\n                value\n            )", "pass"),
        ("total", "found -= value", "found = 0\nfound -= 1", "found -= (\n                value\n            )", None),
        ("total", "value is None", "value is 1 or 2", "value is None", "(value is 1 or 2)"),
        ("total", "values", "values[1:]", "in values:", "in (values[1:]):"),
        ("total", "if value < LIMIT:", "if value <= LIMIT:", "if value < LIMIT:", "if value <= LIMIT:"),
        (
            "total",
            "if value == LIMIT or value is None:",
            "if False:",
            "elif value == LIMIT or value is None:",
            "elif False:",
        ),
        ("total", "def total(values, start=0):", "def total(values, start=1):", "start=0", "start=1"),
        ("total", "for value in values:", "for value in ():", "in values:", "in ():"),
        ("total", "limit=LIMIT,", "", "limit=LIMIT,", ""),
        ("total", '"é",', "'e',", '"é",', "'e',"),
        ("total", "2, 3,", "3, 2,", "2, 3", "3, 2,"),
        ("Sum.value", '**self.rest, "b": 2,', '"b": 3,', '**self.rest, "b": 2', '"b": 3,'),
        (
            "Sum.value",
            "except (KeyError, ValueError) as error:",
            "except KeyError as error:",
            "(KeyError, ValueError)",
            "KeyError",
        ),
        ("Sum.value", "raise SystemExit(1) from error", "return", "raise SystemExit(1) from error", "return"),
        ("Sum", "limit: int = 3", "limit: int = 4", "limit: int = 3", "limit: int = 4"),
        ("", "LIMIT = 3", "LIMIT = 4", "LIMIT = 3", "LIMIT = 4"),
    ],
)
def test_code_is_found_as_syntax_and_nothing_else_is_changed(
    tmp_path: Path, where: str, old: str, new: str, was: str, now: str | None
) -> None:
    place = find_place(tree_of(tmp_path), f"rl_backend.sums:{where}", old, new)
    now = "found = 0\n            found -= 1" if now is None else now
    assert CODE.count(was) == 1
    assert place.text == CODE.replace(was, now)


def test_code_of_several_lines_keeps_its_own_indentation_and_its_strings(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, 'def one(a):\n    if a:\n        b()\n        c("""\nx""")\n')
    old = """
        b()
        c("\\nx")
        """
    new = 'if b():\n    c("""\ny""")\n'
    place = find_place(tree, "rl_backend.sums:one", old, new)
    assert place.text == 'def one(a):\n    if a:\n        if b():\n            c("""\ny""")\n'


@pytest.mark.parametrize(
    ("where", "old", "new", "problem"),
    [
        ("sums:total", "value", "1", "the code stands 6 times in rl_backend.sums:total; it must stand there once"),
        ("sums:total", "found = stop", "1", "the code stands 0 times in rl_backend.sums:total; it must stand there once"),
        ("sums:", "found = start", "1", "the code stands 0 times in rl_backend.sums:;"),
        ("sums:Sum", "raise SystemExit(1) from error", "pass", "the code stands 0 times in rl_backend.sums:Sum;"),
        ("none:of_this", "found = start", "1", "the code stands 0 times in rl_backend.none:of_this;"),
        ("sums:total", "for value in values:", "pass", "statements cannot stand in the place of header"),
        ("sums:total", "limit=LIMIT,", "pass", "expression|statements cannot stand in the place of items"),
        ("sums:total", "found = start", "", "nothing cannot stand in the place of statements"),
    ],
)
def test_code_that_is_not_in_one_place_is_refused(tmp_path: Path, where: str, old: str, new: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        find_place(tree_of(tmp_path), f"rl_backend.{where}", old, new)


def test_code_that_has_moved_is_found_where_the_name_is(tmp_path: Path) -> None:
    fault = ("rl_backend.sums:Sum.value", "1", "2")
    tree_of(tmp_path, "class Sum:\n    def value(self):\n        return 1\n", "actors/far/away.py")
    assert find_place(tmp_path, *fault).where == "actors.far.away:Sum.value"
    # A function of the qualified name comes before others of the last name, and one in the module before those elsewhere.
    tree_of(tmp_path, "class Total:\n    def value(self):\n        return 1\n", "actors/other.py")
    assert find_place(tmp_path, *fault).where == "actors.far.away:Sum.value"
    shutil.rmtree(tmp_path / "actors" / "far")
    assert find_place(tmp_path, *fault).where == "actors.other:Total.value"
    tree_of(tmp_path, "def value():\n    return 1\n")
    assert find_place(tmp_path, *fault).where == "rl_backend.sums:value"
    # A function that is where it is said to be is not looked for elsewhere.
    tree_of(tmp_path, "class Sum:\n    def value(self):\n        return 3\n")
    with pytest.raises(ValueError, match=r"stands 0 times in rl_backend\.sums:Sum\.value;"):
        find_place(tmp_path, *fault)
    tree_of(tmp_path, "")
    tree_of(tmp_path, "def value():\n    return 1\n", "actors/third.py")
    with pytest.raises(ValueError, match=r"stands 2 times in actors.other:Total.value, actors.third:value;"):
        find_place(tmp_path, *fault)


def test_a_module_and_tests_that_move_keep_their_faults_and_results(tmp_path: Path) -> None:
    for package in ("rl_backend", "actors", "adapters", "examples", "benchmarks", "tests"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "results", "*.json")
        )
    (tmp_path / "rl_backend" / "algorithm").rename(tmp_path / "actors" / "mathematics")
    (tmp_path / "actors" / "run" / "stop.py").rename(tmp_path / "rl_backend" / "stopping.py")
    (tmp_path / "tests" / "unit" / "rl_backend" / "algorithm").rename(tmp_path / "tests" / "unit" / "mathematics")
    moved = [fault for fault in FAULTS if fault.where.startswith(("rl_backend.algorithm.", "actors.run.stop:"))]
    assert len(moved) > 30
    assert problems(moved, tmp_path) == []
    for fault in moved:
        assert fault.place(tmp_path).where.startswith(("actors.mathematics.", "rl_backend.stopping:"))
        assert fault.digest(tmp_path) == fault.digest(ROOT)


def test_a_test_is_found_by_its_name_and_by_its_file_where_there_are_two(tmp_path: Path) -> None:
    for file, names in {"unit/test_a.py": "bc", "deep/unit/test_b.py": "cd", "unit/test_b.py": "d"}.items():
        tree_of(tmp_path, "".join(f"def test_{name}(): ...\n" for name in names), f"tests/{file}")
    assert find_test(tmp_path, "test_b[x-1]") == "tests/unit/test_a.py::test_b[x-1]"
    assert find_test(tmp_path, "test_b.py::test_c") == "tests/deep/unit/test_b.py::test_c"
    assert find_test(tmp_path, "deep/unit/test_b.py::test_d") == "tests/deep/unit/test_b.py::test_d"
    for test, problem in {
        "test_c": "2 tests are called test_c .*: say which, as in",
        "test_e": "0 tests are called test_e$",
    }.items():
        with pytest.raises(ValueError, match=problem):
            find_test(tmp_path, test)


def test_a_result_is_stale_when_the_function_or_a_test_of_it_changes(tmp_path: Path) -> None:
    test = "import rl_backend.sums\n\nN = 1\n\n\ndef test_a():\n    assert N\n\n\ndef test_b(): ...\n"
    tree_of(tmp_path), tree_of(tmp_path, test, "tests/test_it.py")
    fault = Fault("name", "rl_backend.sums:total", "found = start", "found = 1", ("test_a",), "why")
    digest = fault.digest(tmp_path)
    for module, code in {
        "rl_backend/sums.py": CODE.replace("LIMIT = 3", "LIMIT = 4").replace("# kept", "").replace('"""The sum."""', ""),
        "tests/test_it.py": test.replace("test_b", "test_c").replace(
            "import rl_backend.sums", "from rl_backend import sums"
        ),
    }.items():
        tree_of(tmp_path, code, module)
        assert fault.digest(tmp_path) == digest
    for module, code in {
        "rl_backend/sums.py": CODE.replace("value < LIMIT", "value <= LIMIT"),
        "tests/test_it.py": test.replace("N = 1", "N = 2"),
    }.items():
        tree_of(tmp_path), tree_of(tmp_path, test, "tests/test_it.py")
        assert fault.digest(tmp_path) == digest
        tree_of(tmp_path, code, module)
        assert fault.digest(tmp_path) != digest
    for change in ({"new": "found = 2"}, {"tests": ("test_b",)}):
        tree_of(tmp_path), tree_of(tmp_path, test, "tests/test_it.py")
        assert fault._replace(**change).digest(tmp_path) != digest


def test_a_fault_that_cannot_be_tried_is_named_with_the_reason(tmp_path: Path) -> None:
    tree_of(tmp_path, "def one():\n    a = 1\n    b = 1\n", "rl_backend/code.py")
    tree_of(tmp_path, "def test_a(): ...\n", "tests/test_code.py")
    good = Fault("good", "rl_backend.code:one", "a = 1", "a = 2", ("test_a[x]",), "why")
    assert problems([good], tmp_path) == []
    cases: list[tuple[dict[str, Any], str]] = [
        ({"old": "1", "new": "2"}, "good: the code stands 2 times in rl_backend.code:one; it must stand there once"),
        ({"where": "rl_backend.code:two"}, "good: the code stands 0 times in rl_backend.code:two; it must stand there once"),
        ({"new": "a ="}, "good: SyntaxError: invalid syntax"),
        ({"new": "a = 1"}, "good: it changes nothing"),
        ({"why": ""}, "good: it changes nothing, names no test or does not say why it matters"),
        ({"tests": ("test_b",)}, "good: 0 tests are called test_b"),
    ]
    for changes, problem in cases:
        (found,) = problems([good._replace(**changes)], tmp_path)
        assert found.startswith(problem)
    assert problems([good, good], tmp_path) == ["good: two faults have this name"]


def test_the_results_count_what_is_listed_and_leave_out_what_is_stale(tmp_path: Path) -> None:
    lost = Fault("lost", "rl_backend:nothing", "of_this", "name", ("test_it",), "why")
    areas = {NAMED: FAULTS[:2], "others": [*FAULTS[2:4], lost]}
    file = tmp_path / "mutations.json"
    file.write_text(json.dumps({"faults": {}, "without_a_fault": {}}))
    for fault, result in zip(FAULTS, ({"killed_by": "t"}, {"survived": "why"}, {"killed_by": "t"}), strict=False):
        results.record(fault.name, {**result, "digest": fault.digest(ROOT)}, areas, file)
    for fault in (FAULTS[3], lost):
        results.record(fault.name, {"killed_by": "t", "digest": "of another text"}, areas, file)
    assert json.loads(file.read_text())["killed"] == 4
    results.tidy(areas, file)
    found = json.loads(file.read_text())
    assert (found["total"], found["killed"], found["named"]) == (5, 2, {"total": 2, "killed": 1})
    assert found["survived"] == {FAULTS[1].name: "why"} and found["not_run"] == [FAULTS[3].name, "lost"]


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
    wrong, interrupting, slow = (
        Fault("name", "rl_backend:value", "return 1", new, ("test_it",), "")
        for new in ("return 2", "raise KeyboardInterrupt", "time.sleep(60)")
    )
    broken = Fault("name", "rl_backend:", "import time", "import nothing_of_this_name", ("test_it",), "")
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
