"""Numbers that are not finite in the files of a run, and in the metrics of several updates."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.folder.folder import RunFolder
from actors.train.model import Update, update_metrics
from rl_backend.contracts import BaseConfig
from rl_backend.lab.report.run_data import read_run
from rl_backend.lab.text import as_number, json_text

ODD = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5, "e": 3}


class Options(BaseConfig):
    steps: int = 1


def standard_json(text: str) -> Any:
    """As a reader that follows the standard."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_come_back_from_standard_json() -> None:
    read = standard_json(json_text({"nested": [ODD, (math.nan,)], "text": "NaN of it"}))
    assert read["nested"][0] == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5, "e": 3}
    for name, value in ODD.items():
        found = as_number(read["nested"][0][name])
        assert found == value or (math.isnan(value) and found is not None and math.isnan(found))
    assert as_number("nan") is None
    assert as_number(None) is None
    with pytest.raises(TypeError):
        json_text({"path": Path("x")})


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    given = {
        "a": np.float32(0.5),
        "b": [np.int64(3), np.bool_(True)],
        "c": torch.tensor(2),
        "d": np.float32("nan"),
        "e": np.array(1.5),
    }
    assert standard_json(json_text(given)) == {"a": 0.5, "b": [3, True], "c": 2, "d": "NaN", "e": 1.5}
    with pytest.raises(TypeError):
        json_text(np.ones(2))


def test_half_of_a_surrogate_pair_can_be_written_and_read_back(tmp_path: Path) -> None:
    given = {"text \udc00": "a \ud83d b", "whole": "\U0001f600 é \\ud83d"}
    for ensure_ascii in (True, False):
        text = json_text(given, ensure_ascii=ensure_ascii)
        assert standard_json(text.encode().decode()) == given
    with RunFolder(tmp_path, Options()) as folder:
        folder.log(1, {"reward": np.float32(0.5), "tokens": np.int64(3)})
        folder.log_samples(1, [{"prompt": "a", "response": "\ud83d", "reward": np.float64(1)}])
    data = read_run(tmp_path)
    assert data.problems == []
    assert data.metrics["reward"].values == (0.5,)
    assert data.samples[0][0]["response"] == "\ud83d"
    assert (tmp_path / "report.html").exists()


@pytest.mark.shows("reading a run: files are standard JSON whatever the numbers, and the report reads them back")
def test_a_runs_files_are_standard_json(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Options()) as folder:
        folder.log(1, ODD)
        folder.log_samples(1, [{"prompt": "a", "response": "b", "reward": math.nan}])
        folder.write_summary({"held_out_reward_before": None, "held_out_reward_after": math.nan})
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json", "run.json", "config.json"):
        standard_json((tmp_path / name).read_text())
    data = read_run(tmp_path)
    assert data.problems == []
    assert math.isnan(data.metrics["a"].values[0])
    assert [data.metrics[name].values[0] for name in "bcde"] == [math.inf, -math.inf, 0.5, 3]
    assert "not finite" in (tmp_path / "report.html").read_text()


def test_the_norm_of_several_updates_is_not_a_number_in_any_order() -> None:
    for norms in itertools.permutations([1.0, math.nan, math.inf]):
        metrics = update_metrics([Update({}, math.isfinite(norm), norm, 1e-4) for norm in norms])
        assert math.isnan(metrics["grad_norm"])
        assert metrics["step_ok"] == pytest.approx(1 / 3)
    assert update_metrics([Update({}, True, 2.0, 1e-4), Update({}, False, math.inf, 1e-4)])["grad_norm"] == math.inf
