"""Waves of faults by readers: the draw of their places, what tests enter, and the record of the first try."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.mutations import results
from tests.mutations.copies import ROOT
from tests.mutations.places import find_place
from tests.mutations.reach import entered_by
from tests.mutations.rules import changes
from tests.mutations.source import definitions
from tests.mutations.waves import faults_by_rule, places

SOURCE = '''
def short(x):
    """Docstrings
    do not
    count
    as lines."""
    return x


class Store:
    def load(self, key):
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        self.hits += 1
        return found
'''
RULED = '''
def add(rows, size):
    """The sum."""
    total: list[int]
    if not rows and size > 2:
        raise ValueError(f"{rows[:1]} of {size + 1}")
    for a, b in zip(rows, rows, strict=True):
        total += max(a, key=b)
    return total
'''
TEST = """
import subprocess
import sys

import pytest

from rl_backend.child_process import open_lifeline


@pytest.fixture(scope="module")
def line():
    with open_lifeline() as line:
        yield line


def test_first(line):
    assert line.fileno()


def test_second(line):
    code = "from rl_backend.child_process import _replace_pipe; _replace_pipe()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_that_fails():
    open_lifeline().close()
    raise AssertionError
"""


def test_places_are_functions_of_five_lines_in_the_order_of_the_seed(tmp_path: Path) -> None:
    for package in ("rl_backend", "actors"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "store.py").write_text(SOURCE)
    found = places(tmp_path, "7")
    assert sorted(found) == ["actors.store:Store.load", "rl_backend.store:Store.load"]
    orders = {tuple(places(tmp_path, str(seed))) for seed in range(9)}
    assert len(orders) == 2
    assert places(tmp_path, "7") == found


def test_changes_by_rule_are_of_statements_and_of_parts_of_expressions_and_leave_messages_alone() -> None:
    ((_, scope),) = list(definitions(ast.parse(RULED)))
    found = list(changes(scope))
    assert len({new for _, new, _ in found}) == len(found)
    assert {(old, new) for old, new, _ in found} == {
        ("if not rows and size > 2:", "if False:"),
        ("if not rows and size > 2:", "if size > 2:"),
        ("if not rows and size > 2:", "if not rows:"),
        ("if not rows and size > 2:", "if not rows or size > 2:"),
        ("if not rows and size > 2:", "if bool(rows) and size > 2:"),
        ("if not rows and size > 2:", "if not rows and size >= 2:"),
        ("if not rows and size > 2:", "if not rows and size > 3:"),
        ("for a, b in zip(rows, rows, strict=True):", "for a, b in list(zip(rows, rows, strict=True))[:1]:"),
        ("total += max(a, key=b)", "total = max(a, key=b)"),
        ("total += max(a, key=b)", "total += max(a)"),
        ("total += max(a, key=b)", "total += min(a, key=b)"),
    }


def test_a_fault_by_rule_is_drawn_for_each_place_and_can_be_put_there(tmp_path: Path) -> None:
    for package in ("rl_backend", "actors"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "store.py").write_text(SOURCE)
    drawn = places(tmp_path, "7")
    faults = faults_by_rule(tmp_path, "7", drawn)
    assert [fault["where"] for fault in faults] == drawn
    assert faults == faults_by_rule(tmp_path, "7", drawn)
    for fault in faults:
        place = find_place(tmp_path, fault["where"], fault["old"], fault["new"])
        assert place.text != SOURCE


def test_every_fault_of_a_wave_says_what_it_does_to_whom() -> None:
    for file in sorted(results.WAVES.glob("*.json")):
        faults = json.loads(file.read_text())["faults"]
        assert len({fault["name"] for fault in faults}) == len(faults)
        assert all(fault["effect"] and fault["kind"] for fault in faults)
        assert all("noticed_by" in fault or "survived" in fault or "equivalent" in fault for fault in faults)


def test_the_record_counts_what_the_first_try_noticed(tmp_path: Path) -> None:
    base = {"effect": "wrong sums"}
    faults = [
        {"name": "seen", "noticed_by": "tests/unit/test_a.py::test_b", **base},
        {"name": "unseen", "survived": "3 tests of 3 that enter it", **base},
        {"name": "nobody-can", "survived": "3 tests of 3 that enter it", "equivalent": "both branches return 0", **base},
        {"name": "later", **base},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"seed": "7", "faults": faults}))
    assert results.by_readers(tmp_path) == {
        "one": {
            "seed": "7",
            "total": 3,
            "tried": 2,
            "noticed": 1,
            "fraction": 0.5,
            "survived": {"unseen": "wrong sums"},
        }
    }


def test_functions_that_fixtures_and_child_processes_enter_count_for_the_tests_that_depend_on_them(tmp_path: Path) -> None:
    (tmp_path / "test_reached.py").write_text(TEST)
    environment = os.environ | {"REACH": str(tmp_path / "reach"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutations.reach", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = {
        name: {test.partition("::")[2] for test in tests} for (_, name), tests in entered_by(tmp_path / "reach").items()
    }
    assert found["open_lifeline"] == {"test_first", "test_second"}
    assert found["_replace_pipe"] == {"test_second"}
