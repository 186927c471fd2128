"""How closely the runtimes agree: ``rl-backend parity`` over 20 steps for pairs and layouts, dense and mixture of experts.

Writes ``results/parity.json``: for each pair the largest relative difference of the loss and of the gradient norm over the
first 5 and over all steps, the first divergence (null when there is none) and by how much the loss fell. For pairs on one
rank bfloat16 is reported beside float32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import machine, write_result
from rl_backend.contracts import ParallelConfig
from rl_backend.parity import ParityConfig, ParitySide, Tolerances, run_parity
from rl_backend.parity.config import DType
from rl_backend.parity.report import as_json

STEPS = 20
FIRST_STEPS = 5
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", SIZES),
    "experts": (
        "qwen3_moe",
        {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
}


class Pair(NamedTuple):
    """Two sides on one model; ``layout`` is the candidate's, ``reference_layout`` the reference's."""

    model: str
    reference: str
    candidate: str
    layout: dict[str, int]
    reference_layout: dict[str, int]

    @property
    def name(self) -> str:
        sides = (side_name(self.reference, self.reference_layout), side_name(self.candidate, self.layout))
        return f"{self.model}: {sides[0]} / {sides[1]}"


PAIRS = (
    Pair("dense", "transformers", "native", {}, {}),
    Pair("dense", "transformers", "bridge", {}, {}),
    Pair("dense", "bridge", "native", {}, {}),
    Pair("dense", "bridge", "native", {"dp": 2}, {"dp": 2}),
    *(Pair("dense", "bridge", "bridge", layout, {}) for layout in ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2})),
    *(Pair("dense", "bridge", "native", layout, layout) for layout in ({"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2})),
    Pair("dense", "native", "native", {"cp": 2}, {}),
    Pair("experts", "transformers", "bridge", {}, {}),
    Pair("experts", "bridge", "native", {}, {}),
    Pair("experts", "bridge", "bridge", {"ep": 2}, {}),
    *(Pair("experts", "bridge", "native", layout, layout) for layout in ({"tp": 2}, {"ep": 2}, {"pp": 2, "vpp": 2})),
)


def side_name(runtime: str, layout: dict[str, int]) -> str:
    return " ".join([runtime, *(f"{name}={size}" for name, size in layout.items())])


def make_model(name: str, directory: Path) -> Path:
    """A random model of the family in ``MODELS``, wide enough apart in its weights that the loss falls."""
    family, settings = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return directory


def make_side(runtime: str, layout: dict[str, int]) -> ParitySide:
    sizes = {name: size for name, size in layout.items() if name != "dp"}
    return ParitySide(runtime=runtime, parallel=ParallelConfig(**sizes), dp=layout.get("dp"))


def compare(pair: Pair, model: Path, dtype: DType) -> dict[str, Any]:
    config = ParityConfig(
        model=str(model),
        reference=make_side(pair.reference, pair.reference_layout),
        candidate=make_side(pair.candidate, pair.layout),
        steps=STEPS,
        lr=1e-4,
        dtype=dtype,
    )
    result = run_parity(config, Tolerances.of(dtype))
    steps = result.comparison.steps
    report = as_json(result)
    return {
        "max_loss_rel_diff": report["max_loss_rel_diff"],
        "max_grad_norm_rel_diff": report["max_grad_norm_rel_diff"],
        "max_loss_rel_diff_5_steps": max(step.loss_difference.amount for step in steps[:FIRST_STEPS]),
        "max_grad_norm_rel_diff_5_steps": max(step.grad_norm_difference.amount for step in steps[:FIRST_STEPS]),
        "loss_fall": report["loss_fall"],
        "first_divergence": report["first_divergence"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="pairs whose name contains this; then nothing is written")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = {name: make_model(name, Path(folder) / name) for name in MODELS}
        for pair in PAIRS:
            if arguments.only not in pair.name:
                continue
            results[pair.name] = compare(pair, models[pair.model], "float32")
            if not pair.layout:
                results[pair.name]["bfloat16"] = compare(pair, models[pair.model], "bfloat16")
            found = results[pair.name]
            print(f"{pair.name}: loss {found['max_loss_rel_diff']:.1e}, grad norm {found['max_grad_norm_rel_diff']:.1e}")
    if arguments.only:
        return
    divergences = [found["first_divergence"] for found in results.values() if found["first_divergence"]]
    payload = {
        "max_loss_rel_diff": max(found["max_loss_rel_diff"] for found in results.values()),
        "max_grad_norm_rel_diff": max(found["max_grad_norm_rel_diff"] for found in results.values()),
        "max_loss_rel_diff_5_steps": max(found["max_loss_rel_diff_5_steps"] for found in results.values()),
        "max_grad_norm_rel_diff_5_steps": max(found["max_grad_norm_rel_diff_5_steps"] for found in results.values()),
        "first_divergence": divergences[0] if divergences else None,
        "steps": STEPS,
        "pairs": results,
        "machine": machine(),
    }
    print(write_result("parity", payload))


if __name__ == "__main__":
    main()
