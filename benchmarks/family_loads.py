"""Load of the experts of a mixture before and after loss-free balancing, on a skewed task.

Sequences have few tokens that are frequent and many that are rare, and routers begin with biases that prefer some experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.family_models import Family, write_small
from benchmarks.report import machine
from rl_backend.algorithm import sft_loss
from rl_backend.contracts import NativeConfig, OptimizerConfig, PackedBatch, RuntimeConfig, TokenSequence
from rl_backend.data.packing import pack
from rl_backend.runtime.native.engine import NativeRuntime, native_runtime
from rl_backend.runtime.native.handle import NativeHandle

RATE, STEPS, LAST = 0.02, 100, 10
"""What a bias moves by in a step, steps, and those at the end over which loads are measured."""

SEQUENCES, LENGTH = 16, 48
SKEW = 0.5
"""What is added to the biases of the first half of the experts."""

BIAS = "e_score_correction_bias"


WITH_BIASES = frozenset({"deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2"})
"""Families whose routers choose with biases that balancing can move."""


def measure_loads(family: Family, folder: Path) -> dict[str, Any]:
    """Max over mean load of an expert, the largest of a layer, in the first step and the last ones; and without the rule."""
    directory = skewed(write_small(family, folder / "model"))
    found = {name: _uneven(family, directory, rate) for name, rate in (("balanced", RATE), ("without_balancing", 0.0))}
    return {
        "max_over_mean": found["balanced"],
        "max_over_mean_without_balancing": found["without_balancing"],
        "rate": RATE,
        "steps": STEPS,
        "measured_over_last_steps": LAST,
        "model": {"model_type": family.model_type, **family.settings("small")},
        "machine": machine(),
    }


def skewed(directory: Path) -> Path:
    """Biases of 0, of the first half of the experts ``SKEW``, which no balancing has chosen."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(BIAS):
            tensor.zero_()
            tensor[: len(tensor) // 2] = SKEW
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def _uneven(family: Family, directory: Path, rate: float) -> Mapping[str, float]:
    config = NativeConfig(
        device="cpu",
        model=family.model_type,
        model_cfg={"expert_bias_rate": rate},
        optimizer=OptimizerConfig(lr=1e-4),
    )
    runtime = native_runtime(RuntimeConfig(hf_path=str(directory), backend_cfg=config))
    try:
        handle = runtime.build_model()
        steps = itertools.islice(_steps(runtime, handle), STEPS)
        loads = [_loads(routes, handle) for routes in steps]
    finally:
        runtime.close()
    return {"before": _max_over_mean(loads[0]), "after": _max_over_mean(torch.stack(loads[-LAST:]).sum(0))}


def _steps(runtime: NativeRuntime, handle: NativeHandle) -> Iterator[Tensor]:
    """Trains; yields each step's routes, (tokens, layers with experts, top_k)."""
    for seed in itertools.count():
        runtime.zero_grad(handle)
        result = runtime.forward_backward(handle, [_batch(handle.vocab_size, seed)], sft_loss, router_replay="record")
        assert runtime.optimizer_step(handle).ok, "gradients of this task are finite"
        yield torch.cat(list(result.output("routed_experts")))


def _batch(vocab_size: int, seed: int) -> PackedBatch:
    """The n-th token is drawn n times as seldom as the first."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = 1.0 / torch.arange(1, vocab_size + 1)
    tokens = torch.multinomial(frequencies.expand(SEQUENCES, -1), LENGTH, replacement=True, generator=generator)
    mask = torch.ones(LENGTH)
    mask[-1] = 0.0
    facts = {"batch_num_tokens": float(SEQUENCES * (LENGTH - 1)), "dp_size": 1}
    return pack([TokenSequence(each, {"loss_mask": mask}) for each in tokens], facts)


def _loads(routes: Tensor, handle: NativeHandle) -> Tensor:
    """(layers, experts): how many tokens chose each."""
    layers = handle.routed_layers
    assert layers is not None, "the family has routers"
    counts = [layer.flatten().long().bincount(minlength=layers.num_experts) for layer in routes.unbind(1)]
    return torch.stack(counts).double()


def _max_over_mean(loads: Tensor) -> float:
    return float((loads.amax(-1) / loads.mean(-1)).max())
