"""What a rank tells of itself: its record, or the error that kept it from one."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rl_backend.contracts import HandleError, RLBackendError
from rl_backend.data import MicroBatchPlan
from rl_backend.lab.parity import compare, rank
from rl_backend.lab.parity.compare import RankRecord, SideRecord, merge_ranks
from rl_backend.lab.parity.config import ParityConfig, ParitySide
from rl_backend.lab.parity.run import start_rank


def merge(*norms: Sequence[float]) -> SideRecord:
    """Ranks with these gradient norms, each with one sequence of its own."""
    activations, log_probs = [{"model.norm": torch.ones(2, 4)}], [torch.ones(2)]
    ranks = [RankRecord(index, True, activations, log_probs, [1.0] * len(norm), norm) for index, norm in enumerate(norms)]
    return merge_ranks(ranks, MicroBatchPlan(tuple(((index,),) for index in range(len(ranks)))))


@pytest.mark.parametrize("norm", [1.1, math.nan, math.inf])
def test_ranks_with_other_gradient_norms_are_refused(norm: float) -> None:
    for norms in ((1.0, norm), (norm, 1.0)):
        with pytest.raises(RLBackendError, match="rank 1 has gradient norm"):
            merge([1.0, norms[0]], [1.0, norms[1]])


def test_gradient_norms_may_be_off_by_rounding_or_not_finite_on_every_rank() -> None:
    merge([1.0, math.nan, math.inf], [1.0 + 1e-7, math.nan, math.inf])


class _Broken:
    def build_model(self, **_: object) -> None:
        raise HandleError("this runtime refuses to work")

    def close(self) -> None:
        raise RuntimeError("a rank is missing")


def test_an_error_is_told_before_the_runtime_is_closed(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "create_runtime", lambda _: _Broken())
    side = ParitySide(runtime="native")
    config = tmp_path / "config.json"
    config.write_text(ParityConfig(model=str(tied_model), reference=side, candidate=side).model_dump_json())
    assert rank.main(str(config), "candidate", str(tmp_path / "out")) == 1
    error = json.loads((tmp_path / "out.error").read_text())
    assert (error["message"], error["expected"]) == ("this runtime refuses to work", True)


def test_versions_are_of_packages_that_are_imported_under_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.0 of {name}")
    for name in ("megatron.core", "megatron.bridge", "megatron_core"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "megatron-core" not in compare.package_versions()
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    found = compare.package_versions()
    assert found["megatron-core"] == "1.0 of megatron-core" and "megatron-bridge" not in found
    assert found["torch"] == "1.0 of torch" and found["python"]


def test_what_a_rank_says_as_it_fails_is_in_its_log(tmp_path: Path) -> None:
    process = start_rank(["no such folder"], os.environ, tmp_path / "log")
    assert process.wait(120) != 0
    assert "Traceback" in (tmp_path / "log").read_text() or "usage" in (tmp_path / "log").read_text()
