"""Checkpoints of several ranks as Hugging Face directories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.checkpoint.hf_export import TrainingWeights
from rl_backend.runtime.interface import Runtime
from tests.support.bridge_runs import open_bridge
from tests.support.bridge_state import train_bridge
from tests.support.moe import write_moe
from tests.support.native import assert_equal_tensors, open_runtime, train
from tests.support.rank_pool import RankPool

CASES: Mapping[str, tuple[str, str, int, dict[str, int], str]] = {
    "native dp2": ("native", "mixture", 2, {}, "bfloat16"),
    "native tp2 pp2": ("native", "dense", 4, {"tp": 2, "pp": 2}, "float32"),
    "native ep2": ("native", "mixture", 2, {"ep": 2}, "float32"),
    "bridge dp2": ("bridge", "dense", 2, {}, "bfloat16"),
    "bridge tp2 pp2": ("bridge", "dense", 4, {"tp": 2, "pp": 2}, "float32"),
    "bridge ep2": ("bridge", "mixture", 2, {"ep": 2}, "bfloat16"),
}
"""Runtime, model, ranks, layout and ``param_dtype``."""


def save_job(model: str, path: str, backend: str, layout: dict[str, int], param_dtype: str) -> dict[str, Tensor]:
    """Saves a trained model; what ``export_weights`` gives in ``param_dtype``, on rank 0."""

    def exported(runtime: Runtime[Any], handle: Any) -> dict[str, Tensor]:
        runtime.save_checkpoint(handle, path)
        stream = runtime.export_weights(handle, dtype=getattr(torch, param_dtype))
        weights = {name: tensor.clone() for name, tensor in stream}
        return weights if dist.get_rank() == 0 else {}

    if backend == "native":
        with open_runtime(model, parallel=layout, param_dtype=param_dtype) as native:
            policy = native.build_model()
            train(native, policy, 2)
            return exported(native, policy)
    with open_bridge(model, layout, param_dtype=param_dtype) as bridge:
        handle = bridge.build_model()
        train_bridge(bridge, handle, 2)
        return exported(bridge, handle)


@pytest.mark.shows("export: checkpoints of both runtimes and of any layout, bit-equal to export_weights")
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_any_layout_holds_what_its_run_exports(
    ranks: RankPool, tied_model: Path, tmp_path: Path, case: str
) -> None:
    backend, family, world_size, layout, param_dtype = CASES[case]
    model = tied_model if family == "dense" else write_moe("qwen3_moe", tmp_path / "model")
    path = tmp_path / "checkpoint"
    arguments = (str(model), str(path), backend, layout, param_dtype)
    expected, *_ = ranks.run(save_job, *arguments, world_size=world_size)
    weights = TrainingWeights(path)
    weights.verify()
    found = {name: tensor.clone() for name, tensor in weights.tensors(getattr(torch, param_dtype))}
    assert_equal_tensors(found, expected)
