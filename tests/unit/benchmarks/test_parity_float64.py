"""The steps in float64 that a failed shape is measured by: the same training, with nothing left in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.parity_float64 import distance, float64_steps
from benchmarks.parity_random import is_rounding
from rl_backend.lab.parity.compare import merge_ranks
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide, plan_batch
from rl_backend.lab.parity.rank import record_training
from tests.support.qwen3_5 import write_qwen3_5

COMPUTED = ("mm", "bmm", "mul", "rsqrt", "exp", "_softmax", "_log_softmax", "addcdiv_")


class Dtypes(TorchDispatchMode):
    """Dtypes of what each operation gives, from the first embedding on.

    Before it a model is built, with frequencies of rotary embeddings in float32, which are the same on every side.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(result, torch.Tensor) and (self.found or name == "embedding"):
            self.found.setdefault(name, set()).add(result.dtype)
        return result


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ParityConfig:
    layers = ["linear_attention", "full_attention"]
    model = write_qwen3_5(tmp_path_factory.mktemp("float64") / "model", layers=2, layer_types=layers, vocab_size=61)
    side = ParitySide(runtime=TRANSFORMERS)
    return ParityConfig(
        model=str(model),
        reference=side,
        candidate=side,
        steps=3,
        num_sequences=4,
        max_length=20,
        device="cpu",
    )


def test_it_is_the_training_of_the_sides(config: ParityConfig) -> None:
    exact = float64_steps(config)
    side = merge_ranks([record_training(config, config.reference)], plan_batch(config, 1))
    rounding = distance(exact, side)
    assert 0.0 < rounding["max_loss_rel_diff"] < 1e-6
    assert 0.0 < rounding["max_grad_norm_rel_diff"] < 1e-5
    assert 0.0 < rounding["gradient_rel_diff"] < 1e-5
    faulty = replace(side, grad_norms=[*side.grad_norms[:2], side.grad_norms[2] * 1.001])
    assert distance(exact, faulty)["max_grad_norm_rel_diff"] == pytest.approx(1e-3, rel=1e-2)
    assert distance(exact, replace(side, losses=[float("nan")] * 3))["max_loss_rel_diff"] == float("inf")


def test_nothing_is_computed_in_float32(config: ParityConfig) -> None:
    with Dtypes() as dtypes:
        float64_steps(config.replace(steps=1))
    kinds = {name: found for name, found in dtypes.found.items() if name in COMPUTED}
    assert {"mm", "rsqrt", "exp"} <= set(kinds)
    assert {dtype for found in kinds.values() for dtype in found} == {torch.float64}, kinds


@pytest.mark.parametrize(
    ("figure", "runtime", "transformers", "rounding"),
    [
        ("max_loss_rel_diff", 1.0e-5, 1.6e-5, True),
        ("max_loss_rel_diff", 4.9e-5, 1.6e-5, False),
        ("max_loss_rel_diff", 1.1e-4, 1.0e-4, False),
        ("gradient_rel_diff", 1.1e-5, 1.0e-5, False),
        ("max_grad_norm_rel_diff", None, 1e-4, False),
        ("max_grad_norm_rel_diff", 1e-4, None, False),
    ],
)
def test_rounding_is_what_transformers_has_too_within_bounds(
    figure: str, runtime: float | None, transformers: float | None, rounding: bool
) -> None:
    same: dict[str, float | None] = {"gradient_rel_diff": 1e-6, "max_loss_rel_diff": 1e-6, "max_grad_norm_rel_diff": 1e-5}
    assert is_rounding({**same, figure: runtime}, {**same, figure: transformers}) is rounding
