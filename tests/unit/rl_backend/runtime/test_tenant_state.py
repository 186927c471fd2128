"""Checkpoints of tenants: what must be as it was when one is loaded, and by what its base is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_backend.contracts import CheckpointError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.tenants.state import _digest_of_directory
from tests.support.native import micro_batches, token_loss

CONFIG = LoRAConfig(rank=4, targets=("q_proj",), dropout=0.25, seed=1)


def test_draws_of_dropout_are_counted_on_and_weights_alone_fit_one_that_drops_more(
    runtime: NativeRuntime, tmp_path: Path
) -> None:
    base = runtime.build_model(trainable=False)
    tenant, same = (runtime.create_lora_adapter(base, CONFIG) for _ in range(2))
    other = runtime.create_lora_adapter(base, CONFIG.replace(dropout=0.5))
    scaled = runtime.create_lora_adapter(base, CONFIG.replace(alpha=1.0))
    for seed in range(3):
        runtime.forward_backward(tenant, micro_batches([[0, 1], [2]], seed=seed), token_loss)
    runtime.optimizer_step(tenant)
    runtime.save_checkpoint(tenant, tmp_path / "saved")
    runtime.load_checkpoint(same, tmp_path / "saved")
    assert [each.rows.num_draws for each in (tenant, same, other)] == [3, 3, 0]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"LoRAConfig\.dropout=0\.25, '\S+' has 0\.5"):
        runtime.load_checkpoint(other, tmp_path / "saved")
    runtime.load_checkpoint(other, tmp_path / "saved", optimizer=False)
    expected = dict(runtime.export_lora_adapter(tenant))
    assert all(torch.equal(value, expected[name]) for name, value in runtime.export_lora_adapter(other))
    for optimizer in (True, False):
        with pytest.raises(CheckpointError, match=r"LoRAConfig\.alpha=32\.0, '\S+' has 1\.0"):
            runtime.load_checkpoint(scaled, tmp_path / "saved", optimizer=optimizer)


def directory(path: Path, files: dict[str, dict[str, Tensor]]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for name, tensors in files.items():
        save_file(tensors, path / name)
    if len(files) > 1:
        places = {name: file for file, tensors in files.items() for name in tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return str(path)


def test_a_base_is_known_by_its_weights_whatever_files_they_are_in(tmp_path: Path) -> None:
    first, second = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
    whole = directory(tmp_path / "whole", {"model.safetensors": {"a": first, "b": second}})
    parted = directory(
        tmp_path / "parted", {"model-1.safetensors": {"b": second.clone()}, "model-2.safetensors": {"a": first.clone()}}
    )
    assert _digest_of_directory(whole) == _digest_of_directory(parted)
    changed = first.clone()
    changed[1, 2] += 1
    others = {
        "swapped": {"a": second, "b": first},
        "changed": {"a": changed, "b": second},
        "renamed": {"a": first, "c": second},
        "fewer": {"a": first},
    }
    found = {
        _digest_of_directory(
            directory(tmp_path / name, {"model.safetensors": {key: value.clone() for key, value in tensors.items()}})
        )
        for name, tensors in others.items()
    }
    assert len(found) == 4 and _digest_of_directory(whole) not in found
