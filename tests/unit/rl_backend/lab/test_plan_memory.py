"""The arithmetic of plans: what an export takes, and what Megatron's layers do."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.contracts import ConfigError, NativeConfig, TensorInfo
from rl_backend.lab.plan import Workload
from rl_backend.lab.plan.activations import StageMemory
from rl_backend.lab.plan.bridge import LocalLayers
from rl_backend.lab.plan.native import sync_bucket_bytes
from rl_backend.runtime.bridge_config import BridgeConfig
from rl_backend.runtime.native.layout import describe_model
from tests.unit.rl_backend.cli.test_plan_command import CONFIG


def tensors(*sizes: int, half: Collection[int] = ()) -> list[TensorInfo]:
    """Of so many elements, float32; those with the numbers ``half`` are bfloat16."""
    return [
        TensorInfo.of(str(index), (size,), torch.bfloat16 if index in half else torch.float32)
        for index, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("byte_budget", "bucket"),
    [
        # Bytes: 32 and 32, 8 in half precision, 64, 320 and 64, 8 in half precision. Each by itself:
        (None, 320),
        # All that fit one after the other, of one dtype.
        (320, 320),
        (384, 384),
        (1024, 448),
    ],
)
@pytest.mark.parametrize("world_size", [2, 8])
def test_an_export_takes_the_largest_of_its_buckets(byte_budget: int | None, bucket: int, world_size: int) -> None:
    found = sync_bucket_bytes(tensors(8, 8, 4, 16, 80, 16, 4, half=(2, 6)), byte_budget, world_size)
    assert found == bucket + bucket // 8 + bucket // world_size + 320


def test_a_single_rank_exports_tensor_by_tensor_within_a_budget_that_holds_the_largest() -> None:
    weights = tensors(16, 80, 64)
    assert sync_bucket_bytes(weights, None, 1) == sync_bucket_bytes(weights, 640, 1) == 320
    with pytest.raises(ConfigError, match="byte_budget=319"):
        sync_bucket_bytes(weights, 319, 1)


NATIVE = StageMemory(kept=1000, put_off=0, forward_peak=1500, backward_peak=1800, evaluation_peak=700)
"""Of a stage of the native runtime: 500 and 800 bytes beyond what it keeps."""


def layers(folder: Path, **options: Any) -> LocalLayers:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    architecture = describe_model(str(folder), NativeConfig(), "log_probs").architecture
    config = BridgeConfig(device="cpu", param_dtype="bfloat16", **options)
    return LocalLayers(architecture, config, Workload(sequence_length=128, micro_batch_tokens=256))


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_that_is_computed_again_is_kept_in_the_backward_pass_alone(tmp_path: Path, last: bool, tp: int) -> None:
    parallel = {"parallel": {"tp": tp}}
    plain, again = layers(tmp_path, **parallel), layers(tmp_path, **parallel, **FULL)
    scores = 2 * (16 // tp) * 128**2 * 4
    assert plain.scores == again.scores == scores
    one, two, three = (plain.stage(NATIVE, number, last=last) for number in (1, 2, 3))
    layer = two.kept - one.kept
    assert three.kept - two.kept == layer > scores
    inputs = 256 // tp * 1024 * 2
    # Two float32 copies for the last norm, and the hidden states of all tokens for the head.
    end = (2 * 256 // tp * 1024 * 4 + 256 * 1024 * 2) if last else 0
    assert one.kept == layer + end
    for number in (1, 3):
        kept_whole, kept_inputs = plain.stage(NATIVE, number, last=last), again.stage(NATIVE, number, last=last)
        assert kept_whole.kept == number * layer + end
        assert kept_inputs.kept == number * inputs + end
        for memory, computed_again in ((kept_whole, 0), (kept_inputs, layer)):
            assert memory.forward_peak - memory.kept == 500 + scores
            assert memory.backward_peak - memory.kept == 800 + 2 * scores + computed_again
            assert (memory.evaluation_peak, memory.put_off) == (700 + 2 * scores, 0)
