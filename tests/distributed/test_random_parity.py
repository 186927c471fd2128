"""``benchmarks.parity --random``: real shapes, stopped and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parity_random, report


@pytest.mark.long
@pytest.mark.shows("parity: random odd shapes train on both runtimes as with transformers, or are refused by name")
def test_random_shapes_pass_and_a_stopped_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    file = tmp_path / "parity.json"
    file.write_text(json.dumps({"pairs": {"kept": True}}))
    assert parity_random.run_random(1, go_on=False)
    first = shapes(file)
    assert first["accepted"] == first["passed"]
    assert min(first["accepted"].values()) >= 1 and min(first["accepted_mixtures"].values()) >= 1
    assert json.loads(file.read_text())["pairs"] == {"kept": True}

    compared: list[int] = []
    compare = parity_random.compare_shape

    def counted(model: Any, seed: int, *arguments: Any) -> dict[str, Any]:
        compared.append(seed)
        return compare(model, seed, *arguments)

    monkeypatch.setattr(parity_random, "compare_shape", counted)
    assert parity_random.run_random(1, go_on=True)
    assert compared == []
    broken = json.loads(file.read_text())
    broken["random_shapes"]["shapes"]["0"]["native"] = {"outcome": "failed", "error": "stopped"}
    file.write_text(json.dumps(broken))
    assert parity_random.run_random(1, go_on=True)
    assert compared == [0]
    assert shapes(file)["shapes"] == first["shapes"]


def shapes(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())["random_shapes"]
    return found
