"""Weights that are computed with in float32 in a model of another dtype: exported, pushed and saved in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.cli.main import main
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.kept_family import stored_bytes
from tests.support.native import open_runtime, train
from tests.support.qwen3_5 import write_qwen3_5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_5(tmp_path_factory.mktemp("qwen3_5") / "model")


def require_float32_of_decay(runtime: NativeRuntime, handle: Any, dtype: torch.dtype | None) -> Iterator[str]:
    """Asserts that decays alone are announced and sent in float32; yields their names."""
    infos = runtime.weight_infos(handle, dtype=dtype)
    for info, (name, tensor) in zip(infos, runtime.export_weights(handle, dtype=dtype), strict=True):
        in_float32 = dtype is None or name.endswith(".A_log")
        assert tensor.dtype == (torch.float32 if in_float32 else dtype), name
        assert (info.name, f"torch.{info.dtype}") == (name, str(tensor.dtype))
        if name.endswith(".A_log"):
            yield name


@pytest.mark.shows("weight sync: decays of gated DeltaNet are pushed and saved in float32, whatever the dtype of the rest")
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_weights_that_are_computed_with_in_float32_are_announced_and_sent_in_it(model: Path, param_dtype: str) -> None:
    with open_runtime(model, param_dtype=param_dtype) as runtime:
        trained = runtime.build_model()
        for dtype in (torch.bfloat16, torch.float16, None):
            assert len(list(require_float32_of_decay(runtime, trained, dtype))) == 3
        base = runtime.build_model(trainable=False)
        tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=2, alpha=4.0, targets=("q_proj",)))
        assert len(list(require_float32_of_decay(runtime, tenant, torch.bfloat16))) == 3
        shards = {shard.name: shard.tensor.dtype for shard in runtime.export_shards(trained, dtype=torch.bfloat16)}
        assert {dtype for name, dtype in shards.items() if name.endswith(".A_log")} == {torch.float32}
        assert {dtype for name, dtype in shards.items() if not name.endswith(".A_log")} == {torch.bfloat16}


def test_a_model_that_is_exported_in_bfloat16_has_the_decays_that_it_was_trained_with(model: Path, tmp_path: Path) -> None:
    with open_runtime(model, param_dtype="bfloat16") as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1)
        runtime.save_checkpoint(handle, tmp_path / "checkpoint")
        exact = {name: tensor.clone() for name, tensor in runtime.export_weights(handle)}
    assert main(["export", "--checkpoint", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out")]) == 0
    found = stored_bytes(tmp_path / "out")
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert found[name].dtype == ("F32" if name.endswith(".A_log") else "BF16"), name
        if name.endswith(".A_log"):
            assert found[name].data == tensor.numpy().tobytes()
