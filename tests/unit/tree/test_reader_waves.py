"""Waves of faults by readers: the draw of their places, what tests enter, and the record of the first try."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.mutations import results
from tests.mutations.copies import ROOT
from tests.mutations.places import find_place
from tests.mutations.reach import entered_by
from tests.mutations.waves import places

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


def test_every_fault_of_a_wave_says_what_it_does_to_whom() -> None:
    for file in sorted(results.WAVES.glob("*.json")):
        faults = json.loads(file.read_text())["faults"]
        assert len({fault["name"] for fault in faults}) == len(faults)
        assert all(fault["effect"] and fault["kind"] for fault in faults)
        placed = [find_place(ROOT, fault["where"], fault["old"], fault["new"]) for fault in faults[:1]]
        assert all(place.text != place.file.read_text() for place in placed)


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
