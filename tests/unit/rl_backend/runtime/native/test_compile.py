"""Training with compiled layers is training without."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import ConfigError, PackedBatch, TokenSequence
from rl_backend.data import pack, prefixes
from rl_backend.model.compiled import require_compiler
from rl_backend.runtime.native.layout import check_config
from tests.support.compiling import calls, counted_graphs
from tests.support.deepseek import write_latent
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import VOCAB_SIZE, assert_near, gradients, make_config, open_in_float64, open_runtime, token_loss
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.random_trees import sequences_of_a_tree
from tests.support.sft_batches import random_token_sequences
from tests.support.variants import write_variant

SMALL = {"hidden_size": 32, "intermediate_size": 48}
# Equal ones, one alone, one token alone, more than a block of attention, and a number of sequences that no other has.
LENGTHS = [(5, 17), (9, 9, 9), (70, 3), (40,), (2,), (6, 5, 4, 3, 2), *((3 + index, 20 - index) for index in range(14))]
ATTENTION = "rl_backend.cpu_attention"


class Run(NamedTuple):
    losses: list[float]
    log_probs: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def batches_of(lengths: Sequence[Sequence[int]]) -> list[PackedBatch]:
    total = float(sum(map(sum, lengths)))
    return [
        pack(random_token_sequences(lens, VOCAB_SIZE, seed), {"batch_num_tokens": total, "dp_size": 1, "temperature": 0.7})
        for seed, lens in enumerate(lengths)
    ]


def train(
    path: Path,
    batches: Sequence[PackedBatch],
    steps: int = 1,
    open_with: Callable[..., Any] = open_in_float64,
    *,
    evaluates: bool = False,
    **settings: Any,
) -> Run:
    """Some steps, and then the outputs of a pass without gradients."""
    with open_with(path, **settings) as runtime:
        handle = runtime.build_model()
        losses, first = [], dict[str, Tensor]()
        for _ in range(steps):
            runtime.zero_grad(handle)
            with runtime.train_mode(handle):
                losses.append(runtime.forward_backward(handle, batches, token_loss).loss)
            first = first or gradients(handle)
            assert runtime.optimizer_step(handle).ok
        outputs: list[Tensor] = []
        if evaluates:
            with runtime.eval_mode(handle):
                outputs = list(runtime.forward_backward(handle, batches, None, forward_only=True).outputs["log_probs"])
        return Run(losses, outputs, first, dict(runtime.export_weights(handle)))


def assert_same(run: Run, expected: Run, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(run.losses, expected.losses, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(run.log_probs, expected.log_probs, rtol=tolerance, atol=tolerance)
    assert_near(run.gradients, expected.gradients, tolerance)
    assert_near(run.weights, expected.weights, tolerance)


@pytest.mark.shows("runtime: layers compiled by torch train as others do, and once for all layers and lengths")
def test_all_layers_and_lengths_have_one_graph_for_training_and_one_for_outputs(tmp_path: Path) -> None:
    path = write_tiny("qwen3", tmp_path, **SMALL)
    batches = batches_of(LENGTHS)
    assert len(batches) == 20
    with counted_graphs() as graphs:
        run = train(path, batches, 2, evaluates=True, compile=True)
    assert len(graphs) == 2
    assert all([name for name in calls(graph) if ATTENTION in name] for graph in graphs)
    assert_same(run, train(path, batches, 2, evaluates=True))


def write_hybrid(path: Path) -> Path:
    return write_qwen3_5(path, moe=False)


FAMILIES: dict[str, tuple[Callable[[Path], Path], int]] = {
    # Layers with a window compile their feed-forward blocks, with experts all but these.
    "a window in one layer": (lambda path: write_variant("gemma3_text", path), 1),
    "parallel blocks, layer norms": (lambda path: write_variant("phi", path), 1),
    "latents, experts": (lambda path: write_latent("deepseek_v3", path), 2),
    "a linear layer": (write_hybrid, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_what_of_a_layer_can_be_compiled_computes_the_same(family: str, tmp_path: Path) -> None:
    write, attending = FAMILIES[family]
    path, batches = write(tmp_path), batches_of(LENGTHS[:3])
    with counted_graphs() as graphs:
        run = train(path, batches, compile=True)
    assert sum(any(ATTENTION in name for name in calls(graph)) for graph in graphs) == attending
    assert_same(run, train(path, batches))


def test_shared_prefixes_and_recomputation_are_compiled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    path = write_tiny("qwen3", tmp_path, **SMALL)
    batches = [
        pack(
            [
                TokenSequence(ids, {"loss_mask": (torch.arange(len(ids)) < len(ids) - 1).double()})
                for ids in sequences_of_a_tree(seed)
            ],
            {"batch_num_tokens": 100.0, "dp_size": 1},
        )
        for seed in range(3)
    ]
    settings = {"share_prefixes": "auto", "activation_checkpointing": "full"}
    with counted_graphs() as graphs:
        run = train(path, batches, compile=True, **settings)
    assert graphs
    assert_same(run, train(path, batches, **settings))


@pytest.mark.long
def test_hooks_see_what_compiled_layers_compute(tmp_path: Path) -> None:
    path, batches = write_tiny("qwen3", tmp_path, **SMALL), batches_of(LENGTHS[:2])

    def activations(**settings: Any) -> list[Any]:
        with open_runtime(path, **settings) as runtime:
            handle = runtime.build_model()
            runtime.forward_backward(handle, batches, token_loss)
            return list(runtime.activations(handle, batches))

    with counted_graphs():
        found = activations(compile=True)
    torch.testing.assert_close(found, activations())


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_generated_code_trains_within_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tolerance: float
) -> None:
    import torch._dynamo

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    path, batches = write_tiny("qwen3", tmp_path / "model", **SMALL), batches_of(LENGTHS[:3])
    with torch._dynamo.config.patch(disable=False):
        run = train(path, batches, open_with=open_runtime, compile=True, param_dtype=dtype)
    expected = train(path, batches, open_with=open_runtime, param_dtype=dtype)
    torch.testing.assert_close(run.losses, expected.losses, rtol=tolerance / 10, atol=0.0)
    assert_near(run.gradients, expected.gradients, tolerance)


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_schedules_that_split_the_backward_pass_are_refused(schedule: str, tmp_path: Path) -> None:
    path, parallel = write_tiny("qwen3", tmp_path), {"pp": 2, "vpp": 1 + (schedule == "zbv")}
    with pytest.raises(ConfigError, match=rf"compile=True: pipeline_schedule='{schedule}' puts gradients of weights off"):
        check_config(make_config(path, compile=True, pipeline_schedule=schedule, parallel=parallel))


def test_a_model_for_tenants_or_without_a_part_that_compiles_and_a_machine_without_a_compiler_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither experts nor windows compile on a CPU.
    path = write_moe("mixtral", tmp_path, sliding_window=4)
    with open_runtime(path, compile=True) as runtime:
        with pytest.raises(ConfigError, match=r"compile=True: .* is for LoRA tenants"):
            runtime.build_model(trainable=False)
        with pytest.raises(ConfigError, match=r"compile=True: .*this model has none of them in this layout"):
            runtime.build_model()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile=True: needs a C\+\+ compiler, and there is no 'no-such-compiler'"):
        require_compiler()
