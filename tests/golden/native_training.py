"""The short training run whose losses and gradient norms ``native_training.json`` fixes.

``python -m tests.golden.native_training`` writes the file anew; say in the change why the curve moved.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rl_backend.contracts import OptimizerConfig
from tests.support.models import write_tiny_qwen3
from tests.support.native import open_runtime, train

GOLDEN_FILE = Path(__file__).with_name("native_training.json")
STEPS = 8
OPTIMIZER = OptimizerConfig(lr=3e-4, lr_warmup_steps=3, lr_decay_style="cosine", total_training_steps=10, weight_decay=0.1)
RUNS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
}


def training_curve(model: Path) -> dict[str, list[float]]:
    """Loss and gradient norm of each step from a fixed seed on one rank."""
    with open_runtime(model, optimizer=OPTIMIZER) as runtime:
        curve = train(runtime, runtime.build_model(), STEPS)
    return {"loss": [loss for loss, _ in curve], "grad_norm": [norm for _, norm in curve]}


def all_curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    return {name: training_curve(write_tiny_qwen3(folder / name, **changes)) for name, changes in RUNS.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        GOLDEN_FILE.write_text(json.dumps(all_curves(Path(temporary)), indent=1) + "\n")
