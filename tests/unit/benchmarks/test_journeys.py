"""The traced journeys name files and functions that exist, and the page of the architecture walks them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.call_trace import ROOT
from benchmarks.journeys import JOURNEYS, folders
from benchmarks.report import read_result

FOUND: dict[str, Any] = read_result("journeys")
NAMES = [name.lower().replace(" ", "_") for name in JOURNEYS]


@pytest.mark.parametrize("name", NAMES)
def test_files_and_functions_of_a_journey_exist(name: str) -> None:
    path: dict[str, list[str]] = FOUND[name]["path"]
    missing = [file for file in [*path, *FOUND[name]["beside"]] if not (ROOT / file).is_file()]
    assert missing == [], "run: python -m benchmarks.journeys"
    for file, functions in path.items():
        text = (ROOT / file).read_text()
        last = {function.rpartition(".")[2] for function in functions} - {"<lambda>", "<genexpr>", "__init__", "__exit__"}
        assert [each for each in last if not re.search(rf"\b{re.escape(each)}\b", text)] == [], file


@pytest.mark.parametrize("name", NAMES)
def test_a_journey_counts_its_own_files_and_folders(name: str) -> None:
    found = FOUND[name]
    assert found["files"] == len(found["path"])
    assert found["folders"] == len(folders(found["path"]))
    itself = found["itself"]
    assert set(itself["passed"]) <= set(found["path"])
    assert (itself["files"], itself["folders"]) == (len(itself["passed"]), len(folders(itself["passed"])))


def test_a_batch_itself_passes_at_most_20_files_in_8_folders() -> None:
    itself = FOUND["batch_to_gradient"]["itself"]
    assert itself["files"] <= 20 and itself["folders"] <= 8, itself["passed"]


@pytest.mark.parametrize("name", NAMES)
def test_the_architecture_walks_a_journey_file_by_file(name: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = re.split(r"^##+ ", page, flags=re.MULTILINE)
    (walk,) = (each for each in section if each.lower().startswith(name.replace("_", " ")))
    rows = re.findall(r"^\| `([\w/]+\.py)` \|", walk, re.MULTILINE)
    assert rows == list(FOUND[name]["path"]), "run: python -m benchmarks.journeys, and walk its files in its order"
