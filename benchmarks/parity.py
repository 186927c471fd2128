"""Agreement of the runtimes: parity over 20 steps for pairs and layouts, dense and mixture of experts.

Writes ``pairs`` of ``results/parity.json``: for each pair the largest relative difference of the loss and of the gradient
norm over the first 5 and over all steps, the first divergence (null when there is none), by how much the loss fell, and
bfloat16 beside float32. A pair with a layout that a runtime refuses holds the refusal. ``--random N`` writes
``random_shapes``, ``--lora`` writes ``lora``. All write after every comparison; ``--continue`` takes up a run that was
stopped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.forked_ranks import start_forked_rank
from benchmarks.parity_lora import run_lora
from benchmarks.parity_random import is_refusal, run_random
from benchmarks.report import machine, read_result, update_result
from rl_backend.contracts import ParallelConfig, RLBackendError
from rl_backend.lab.parity.compare import SideRecord, Tolerances
from rl_backend.lab.parity.config import TRANSFORMERS, DType, ParityConfig, ParitySide
from rl_backend.lab.parity.run import LEAST_LOSS_FALL, compare_sides, record_side
from rl_backend.lab.text import finite

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


LAYOUTS: tuple[dict[str, int], ...] = ({}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"ep": 2}, {"cp": 2})
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")


class Side(NamedTuple):
    """One runtime in one layout."""

    runtime: str
    layout: dict[str, int]

    @property
    def name(self) -> str:
        return " ".join([self.runtime, *(f"{name}={size}" for name, size in self.layout.items())])

    @property
    def parity_side(self) -> ParitySide:
        sizes = {name: size for name, size in self.layout.items() if name != "dp"}
        return ParitySide(runtime=self.runtime, parallel=ParallelConfig(**sizes), dp=self.layout.get("dp"))


class Pair(NamedTuple):
    """Two sides on one model."""

    model: str
    reference: Side
    candidate: Side

    @property
    def name(self) -> str:
        return f"{self.model}: {self.reference.name} / {self.candidate.name}"


def pairs(model: str) -> Iterator[Pair]:
    """Layout by layout: each runtime against transformers on one rank, then native against bridge in the layout."""
    transformers = Side("transformers", {})
    for layout in LAYOUTS:
        native, bridge = Side("native", layout), Side("bridge", layout)
        yield from (Pair(model, *sides) for sides in ((transformers, native), (transformers, bridge), (bridge, native)))


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


class Recorder:
    """Sides of one model in one dtype. Each side runs once, in separate processes."""

    def __init__(self, model: Path, dtype: DType, folder: Path) -> None:
        self._model, self._dtype, self._folder = model, dtype, folder
        self._records: dict[str, SideRecord | RLBackendError] = {}

    def record(self, side: Side) -> SideRecord:
        """Raises the :class:`RLBackendError` that ended the side."""
        if side.name not in self._records:
            folder = self._folder / side.name.replace(" ", "-")
            try:
                self._records[side.name] = record_side(self.config(side), "candidate", folder, start_forked_rank)
            except RLBackendError as error:
                self._records[side.name] = error
        found = self._records[side.name]
        if isinstance(found, RLBackendError):
            raise found
        return found

    def compare(self, pair: Pair) -> dict[str, Any]:
        """One cell: figures, or the refusal of a side."""
        try:
            comparison = compare_sides(
                self.config(pair.candidate),
                self.record(pair.reference),
                self.record(pair.candidate),
                Tolerances.of(self._dtype),
            )
        except RLBackendError as error:
            message = str(error).replace(str(self._model), "MODEL")
            return {"refused" if is_refusal(error) else "failed": message}
        steps, divergence = comparison.steps, comparison.first_divergence
        largest = {stage.stage: stage.largest for stage in comparison.stages}
        return {
            "max_log_prob_diff": finite(largest["log-probs"].max_abs_difference),
            "max_gradient_rel_diff": finite(largest["gradient"].amount),
            "max_loss_rel_diff": comparison.max_loss_difference,
            "max_grad_norm_rel_diff": comparison.max_grad_norm_difference,
            "max_loss_rel_diff_5_steps": max(step.loss_difference.amount for step in steps[:FIRST_STEPS]),
            "max_grad_norm_rel_diff_5_steps": max(step.grad_norm_difference.amount for step in steps[:FIRST_STEPS]),
            "loss_fall": comparison.loss_fall,
            "first_divergence": None if divergence is None else str(divergence),
        }

    def config(self, side: Side) -> ParityConfig:
        return ParityConfig(
            model=str(self._model),
            reference=Side(TRANSFORMERS, {}).parity_side,
            candidate=side.parity_side,
            steps=STEPS,
            lr=1e-4,
            dtype=self._dtype,
            device="cpu",
        )


def run_pairs(only: str, *, go_on: bool) -> bool:
    """Writes after every comparison, all of float32 first. Returns whether all cells are good."""
    cells: dict[str, dict[str, Any]] = dict(read_result("parity").get("pairs", {})) if go_on or only else {}
    with tempfile.TemporaryDirectory(prefix="rl-backend-parity-") as folder:
        models = {name: make_model(name, Path(folder) / name) for name in MODELS}
        for dtype in DTYPES:
            for model, path in models.items():
                recorder = Recorder(path, dtype, make_folder(Path(folder) / f"{model}-{dtype}"))
                for pair in pairs(model):
                    if only in pair.name and not (go_on and is_done(cells.get(pair.name, {}), dtype)):
                        fill(cells, pair, dtype, recorder)
    return all(is_done(cell, dtype) for name, cell in cells.items() if only in name for dtype in DTYPES)


def fill(cells: dict[str, dict[str, Any]], pair: Pair, dtype: DType, recorder: Recorder) -> None:
    """Adds what ``recorder`` finds to the pair's cell and writes the file; a refusal holds for both dtypes."""
    if dtype == "bfloat16" and "refused" in cells[pair.name]:
        return
    found = recorder.compare(pair)
    if dtype == "float32":
        cells[pair.name] = found
    else:
        cells[pair.name] |= {dtype: found}
    print(f"{pair.name} {dtype}: {in_words(found)}", flush=True)
    update_result("parity", summary(cells))


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def is_done(cell: Mapping[str, Any], dtype: DType) -> bool:
    """Refused, or measured; in float32 within the tolerances, with a loss that falls. bfloat16 is only reported."""
    if "refused" in cell:
        return True
    if dtype == "bfloat16":
        return "max_loss_rel_diff" in cell.get(dtype, {})
    return "max_loss_rel_diff" in cell and cell["first_divergence"] is None and cell["loss_fall"] >= LEAST_LOSS_FALL


def summary(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    measured = [cell for cell in cells.values() if "max_loss_rel_diff" in cell]
    figures = ("max_loss_rel_diff", "max_grad_norm_rel_diff", "max_loss_rel_diff_5_steps", "max_grad_norm_rel_diff_5_steps")
    divergences = [cell["first_divergence"] for cell in measured if cell["first_divergence"]]
    return {
        **({figure: max(cell[figure] for cell in measured) for figure in figures} if measured else {}),
        "least_loss_fall": min((cell["loss_fall"] for cell in measured), default=None),
        "first_divergence": divergences[0] if divergences else None,
        "steps": STEPS,
        "refused": sum("refused" in cell for cell in cells.values()),
        "pairs": dict(cells),
        "machine": machine(),
    }


def in_words(cell: Mapping[str, Any]) -> str:
    if "max_loss_rel_diff" not in cell:
        return f"refused: {cell['refused']}" if "refused" in cell else f"failed: {cell['failed']}"
    loss, norm = cell["max_loss_rel_diff"], cell["max_grad_norm_rel_diff"]
    divergence = cell["first_divergence"] or "no divergence"
    return f"loss {loss:.1e}, grad norm {norm:.1e}, the loss fell by {cell['loss_fall']:.1%}; {divergence}"


def main() -> int:
    """Exit status 1 when two sides differ by more than the tolerances, or one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--random", type=int, metavar="N", help="odd shapes instead, until each runtime has accepted N")
    parser.add_argument("--lora", action="store_true", help="LoRA tenants of one batch against peft, one by one, instead")
    parser.add_argument("--only", default="", help="pairs whose name contains this; the others in the file stay")
    parser.add_argument("--continue", action="store_true", dest="go_on", help="keep what the file has and run the rest")
    arguments = parser.parse_args()
    if arguments.random is not None and (arguments.random < 1 or arguments.only):
        parser.error("--random takes a number of at least 1, and no --only")
    if arguments.lora and (arguments.random is not None or arguments.only or arguments.go_on):
        parser.error("--lora takes no other option")
    if arguments.lora:
        return 0 if run_lora() else 1
    if arguments.random is not None:
        return 0 if run_random(arguments.random, go_on=arguments.go_on) else 1
    return 0 if run_pairs(arguments.only, go_on=arguments.go_on) else 1


if __name__ == "__main__":
    sys.exit(main())
