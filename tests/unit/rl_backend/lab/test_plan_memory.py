"""The arithmetic of plans: exports, gathered parameters, passes in flight, Megatron's layers."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.contracts import ConfigError, NativeConfig, TensorInfo
from rl_backend.lab.plan.bridge import LocalLayers
from rl_backend.lab.plan.memory import ParameterSize, ShardedStage, Workload
from rl_backend.lab.plan.native import StageMemory, most_in_flight, sync_bucket_bytes
from rl_backend.pipeline import Action, Kind
from rl_backend.runtime.bridge.config import BridgeConfig
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
    # Two float32 copies for the last norm, and the hidden states and logits of all tokens for the head.
    end = (2 * 256 // tp * 1024 * 4 + 256 * 1024 * 2 + 256 * (32000 // tp) * 4) if last else 0
    assert one.kept == layer + end
    for number in (1, 3):
        kept_whole, kept_inputs = plain.stage(NATIVE, number, last=last), again.stage(NATIVE, number, last=last)
        assert kept_whole.kept == number * layer + end
        assert kept_inputs.kept == number * inputs + end
        for memory, computed_again in ((kept_whole, 0), (kept_inputs, layer)):
            assert memory.forward_peak - memory.kept == 500 + scores
            assert memory.backward_peak - memory.kept == 800 + 2 * scores + computed_again
            assert (memory.evaluation_peak, memory.put_off) == (700 + 2 * scores, 0)


def test_gathered_layers_are_two_at_one_time_with_all_that_is_in_them() -> None:
    """On one of four ranks; the second layer is frozen, and the ends are computed with in float32."""
    sizes = {
        "embed.weight": (25, 100, True),
        "layers.0.q.weight": (5, 20, True),
        "layers.0.experts.up.weight": (15, 30, True),
        "layers.1.q.weight": (10, 40, False),
        "head.weight": (2, 8, False),
    }
    parameters = {
        name: ParameterSize(held, computed, (computed,), trained, False) for name, (held, computed, trained) in sizes.items()
    }
    units = {
        "": ("embed.weight", "head.weight"),
        "layers.0": ("layers.0.q.weight",),
        "layers.0.experts": ("layers.0.experts.up.weight",),
        "layers.1": ("layers.1.q.weight",),
    }
    stage = ShardedStage(parameters, units, frozenset({"embed.weight"}))
    assert stage.gathered(all_at_once=True) == 198
    assert stage.gathered(all_at_once=True, trained=True) == 150
    assert stage.gathered(all_at_once=False) == 108 + 2 * 50
    assert stage.gathered(all_at_once=False, trained=True) == 100 + 2 * 50
    assert stage.gathered_bytes(torch.float32, all_at_once=True) == 4 * 198
    assert stage.gathered_bytes(torch.bfloat16, all_at_once=True) == 2 * 98 + 4 * 100
    assert stage.held_bytes(torch.bfloat16) == 2 * 32 + 4 * 25 and stage.held_bytes(torch.float32) == 4 * 57
    alone = ShardedStage(parameters, {}, frozenset({"embed.weight"}))
    assert alone.gathered(all_at_once=True) == alone.gathered_bytes(torch.bfloat16, all_at_once=False) == 0


def test_the_most_of_a_rank_is_at_one_of_its_passes() -> None:
    """Two stages of the rank, whose backward passes are cut in two; sends take nothing."""
    first = StageMemory(kept=10, put_off=4, forward_peak=17, backward_peak=30, evaluation_peak=6, flops=3)
    second = StageMemory(kept=20, put_off=5, forward_peak=22, backward_peak=28, evaluation_peak=9, flops=4)
    forwards = [Action(Kind.FORWARD, 0, 0), Action(Kind.SEND_ACTIVATION, 0, 0), Action(Kind.FORWARD, 1, 0)]
    forwards.append(Action(Kind.FORWARD, 0, 1))
    stages = {0: first, 1: second}
    found = most_in_flight(forwards, stages)
    # 10 + 20 + 10 are kept, and the last forward pass takes 7 beside.
    assert (found.activations, found.workspace, found.flops) == (40, 7, 10)
    assert (found.evaluation_workspace, found.kept_per_micro_batch) == (9, {0: 10, 1: 20})
    whole = most_in_flight([*forwards, Action(Kind.BACKWARD, 1, 0), Action(Kind.BACKWARD, 0, 0)], stages)
    # Of the second stage 8 beside what is kept, then of the first 20 beside 20.
    assert (whole.activations, whole.workspace, whole.flops) == (40, 8, 10)
    cut = [Action(Kind.BACKWARD_INPUT, 1, 0), Action(Kind.BACKWARD_INPUT, 0, 0)]
    found = most_in_flight([*forwards, *cut], stages)
    # What the second stage puts off is still there: 10 + 10 + 5, and 20 beside.
    assert (found.activations, found.workspace) == (40, 8)
    done = [Action(Kind.BACKWARD_WEIGHT, 1, 0), Action(Kind.BACKWARD_WEIGHT, 0, 0)]
    again = [*forwards, *cut, *done, Action(Kind.FORWARD, 1, 1), Action(Kind.FORWARD, 0, 2), Action(Kind.BACKWARD, 0, 1)]
    found = most_in_flight(again, stages)
    # 10 of the second micro-batch, 20 and 10 of what follows, and 20 of a backward pass of the first stage.
    assert (found.activations, found.workspace, found.flops) == (40, 20, 17)
    # A stage that is another rank's takes nothing here.
    found = most_in_flight([*forwards, *cut, *done, *forwards], {0: first})
    assert (found.activations, found.workspace, found.flops) == (20, 20, 12)
