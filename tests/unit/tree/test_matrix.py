"""The choice of cases that ``make test`` runs, and the record of a whole run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Hashable, Iterable
from itertools import product
from pathlib import Path

import pytest

from tests.support.claims import ROOT
from tests.support.covering import covering, facts, pairs
from tests.support.matrix import LEFT_OUT

SIZES = {"tp": ("1", "2", "4"), "pp": ("1", "2"), "cp": ("1", "2"), "backend": ("native", "bridge"), "replay": ("R2", "R3")}
PRODUCT = {"-".join(values): list(zip(SIZES, values, strict=True)) for values in product(*SIZES.values())}


def test_the_chosen_cases_cover_every_pair_of_values() -> None:
    covered = {name: pairs(values) for name, values in PRODUCT.items()}
    chosen = covering(covered)
    assert set().union(*(covered[name] for name in chosen)) == set().union(*covered.values())
    assert 3 * 2 <= len(chosen) < len(PRODUCT) / 4


def test_of_two_cases_that_cover_the_same_the_cheaper_is_chosen() -> None:
    assert covering({"four ranks": {1, 2}, "two ranks": {1, 2}}, {"four ranks": 2.0}) == {"two ranks"}
    assert covering({"first": {1}, "second": {1}}) == {"first"}


@pytest.mark.parametrize(
    ("test", "values", "expected"),
    [
        (
            "test_native_layouts.py::test_mixtures_train[4-ranks-tp2-ep2]",
            [],
            "backend=native ep=2 family=mixture ranks=4 tp=2",
        ),
        ("test_x.py::test_x[a]", ["layout={'pp': 2, 'vpp': 2, 'cp': 1}", "schedule='zbv'"], "pp=2 schedule=zbv vpp=2"),
        ("test_x.py::test_x[bridge tp2]", ["world_size=2"], "backend=bridge ranks=2 tp=2"),
        ("test_x.py::test_x[0]", ["parallel=(('etp', 2),)"], "etp=2"),
        ("test_router_replay.py::test_x[interleaved-1f1b-2]", [], "feature=router replay schedule=interleaved-1f1b"),
        ("test_http2.py::test_x[step-tps2]", [], ""),
    ],
)
def test_facts_of_a_case_are_read_from_its_name_and_its_parameters(test: str, values: list[str], expected: str) -> None:
    assert " ".join(f"{axis}={value}" for axis, value in sorted(facts(test, values))) == expected


TESTS = """
import pytest

@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_one_size(layout): pass

@pytest.mark.parametrize("layout", [{"tp": 2, "cp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_other(layout): assert layout != {"cp": 2}

@pytest.mark.parametrize("value", "xyz")
@pytest.mark.parametrize("number", [5, 6])
@pytest.mark.parametrize("letter", "ab")
def test_three(letter, number, value): pass

@pytest.mark.long
def test_long(): pass
"""
RUN = """
import sys
from pathlib import Path
from tests import lanes

lanes.ROOT, lanes.NICENESS = Path(sys.argv[1]), (0, 5)
lanes.LANES = (("tests/unit",), ("tests/distributed", "tests/e2e/test_last.py", "--suite"))
sys.exit(lanes.main(sys.argv[2:]))
"""


def run_small_suite(folder: Path, *arguments: str) -> str:
    for name in ("tests/distributed", "tests/e2e", "tests/unit"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "tests/distributed/test_some.py").write_text(TESTS)
    (folder / "tests/unit/test_one.py").write_text("def test_one(): pass\n")
    (folder / "tests/e2e/test_last.py").write_text("def test_last(): pass\n")
    (folder / "conftest.py").write_text("from tests.support.matrix import pytest_addoption, pytest_configure\n")
    options = "addopts = -m 'not long' -p no:cacheprovider\nmarkers =\n    long\n"
    (folder / "pytest.ini").write_text(f"[pytest]\n{options}")
    command = [sys.executable, "-c", RUN, str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout


def ids(case: str) -> list[str]:
    return case.partition("[")[2].removesuffix("]").split("-") if "[" in case else case.split("-")


def covered(cases: Iterable[str]) -> set[frozenset[Hashable]]:
    return set().union(*(pairs(ids(case)) for case in cases))


def test_a_whole_run_writes_its_cases_and_what_a_short_one_leaves_out(tmp_path: Path) -> None:
    run_small_suite(tmp_path, "-m", "long or not long", "--matrix=matrix.json")
    found = json.loads((tmp_path / "matrix.json").read_text())
    name = "tests/distributed/test_some.py::test_other"
    assert {case.removeprefix(name): each["run_by"] for case, each in found["cases"].items() if case.startswith(name)} == {
        "[{'tp': 2, 'cp': 2}]": "make test",
        "[{'tp': 2}]": "make test-all",
        "[{'cp': 2}]": "make test-all",
    }
    left_out = found["cases"][f"{name}[{{'cp': 2}}]"]
    assert (left_out["outcome"], left_out["why"], left_out["has"]) == ("failed", "covered", {"cp": "2"})
    assert found["cases"]["tests/distributed/test_some.py::test_long"]["why"] == "long"
    assert found["axes"]["tp"]["2"] == {"passed": 3, "in make test": 1}
    three = {case: each for case, each in found["cases"].items() if "test_three" in case}
    assert all(pair in covered(three) for pair in covered(map("-".join, product("xyz", "56", "ab"))))
    assert {letter for case, each in three.items() if each["run_by"] == "make test" for letter in ids(case)} == set(
        "xyz56ab"
    )
    (left,) = found["not_in_make_test_all"].items()
    assert left[0] == "tests/distributed/test_some.py::test_three" and len(left[1]) == 12 - len(three) >= 5
    assert found["outcomes"] == {"passed": 7 + len(three), "failed": 1}
    assert found["reduced_to_pairs"] == {"make test": 3 + 12 - 3, "make test-all": len(left[1])}
    assert found["not_selected"] == 0
    assert found["files"]["tests/unit/test_one.py"]["passed"] == 1


def test_a_short_run_leaves_out_what_others_cover_unless_the_file_is_named(tmp_path: Path) -> None:
    assert "6 passed, 13 deselected" in run_small_suite(tmp_path)
    assert not (tmp_path / "matrix.json").exists()
    named = run_small_suite(tmp_path, str(tmp_path / "tests/distributed/test_some.py"))
    assert "1 failed, 16 passed, 1 deselected" in named


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_is_left_out_is_a_case(case: str) -> None:
    file, test, value = re.fullmatch(r"(.+)::(\w+)(?:\[(.+)\])?", case).groups()  # type: ignore[union-attr]
    source = (ROOT / file).read_text()
    assert f"def {test}(" in source
    assert all(part in source for part in (value or "").split("-"))
