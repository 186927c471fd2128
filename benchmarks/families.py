"""Every family of the project: is it exact, in which layouts, what does a push cost in exactness, how fast does it train?

Each family has four parts, and those whose routers have biases a fifth. Each can be measured alone (``--family``,
``--part``, both may be given several times) and replaces that part of the family in ``results/families.json``:

- ``parity``: native and bridge against transformers, one sequence at a time, and against each other;
- ``layouts``: each layout of each runtime against one rank of it;
- ``push``: log-probs of a vLLM engine against those of the trainer whose weights it was sent, in float32 and bfloat16;
- ``loads``: how evenly experts are loaded before and after loss-free balancing, see :mod:`benchmarks.family_loads`;
- ``speed``: ``native_over_transformers``, tokens per second, with the workloads and steps of :mod:`benchmarks.train_speed`.

What a runtime or the engine refuses stands there with its message. ``python -m benchmarks.capabilities`` makes
docs/capabilities.md of the file. OpenMP threads that wait sleep, as in an actor.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.family_loads import WITH_BIASES, measure_loads
from benchmarks.family_models import FAMILIES, WITHOUT_SPEED, Family, write_timed
from benchmarks.family_parity import measure_layouts, measure_parity
from benchmarks.family_push import is_good, measure_push
from benchmarks.report import machine, read_result, require_sleeping_threads, update_result
from benchmarks.train_speed import measure_workload, runtime_step, transformers_step, workloads
from rl_backend.lab.parity.text import LEAST_LOSS_FALL
from rl_backend.lab.text import finite
from tests.support.sparse_models import corrected_rotations

RESULT = "families"
RUNS, THREADS = 5, 2


def measure_speed(family: Family, folder: Path, runs: int, threads: int) -> dict[str, Any]:
    """Medians of interleaved steps of both, and what transformers computed with."""
    torch.set_num_threads(threads)
    facts = machine()
    directory = write_timed(family, folder / "model")
    # Of GLM-5's attentions in transformers this one alone is causal.
    options = {"attn_implementation": "eager"} if family.corrected else {}
    fields = family.settings("timed")
    with corrected_rotations(family.model_type) if family.corrected else nullcontext():
        steps = {"native": runtime_step(directory, "native"), "transformers": transformers_step(directory, **options)}
        results = {
            name: measure_workload(name, lengths, steps, runs, fields["vocab_size"])
            for name, lengths in workloads(seed=0).items()
        }
    return {
        "native_over_transformers": {name: result.pop("ratios")["transformers"] for name, result in results.items()},
        "workloads": results,
        "runs": runs,
        "dtype": "float32",
        "transformers_implementations": {**implementations(directory), **options},
        "model": {"model_type": family.model_type, **fields},
        "machine": facts,
    }


def implementations(directory: Path) -> dict[str, str | None]:
    """What transformers computes attention and experts with when nothing is asked for."""
    from transformers import AutoModelForCausalLM

    config = AutoModelForCausalLM.from_pretrained(directory).config
    names = ("_attn_implementation", "_experts_implementation")
    return {name.strip("_"): getattr(config, name, None) for name in names}


type Measure = Callable[[Family, Path], dict[str, Any]]


def record(name: str, part: str, found: Mapping[str, Any]) -> None:
    """Puts a part in place of an earlier one; the ratios of ``speed`` stand beside it, where they are looked for."""
    entry = {**read_result(RESULT).get(name, {}), part: dict(found)}
    if part == "speed":
        entry["native_over_transformers"] = entry["speed"].pop("native_over_transformers")
    update_result(RESULT, {name: finite(entry)})


def failures(part: str, found: Mapping[str, Any]) -> list[str]:
    """Comparisons of a part that are neither as they have to be nor refused."""
    if part == "push":
        return [] if is_good(found) else [part]
    if part == "speed":
        return []
    if part == "loads":
        uneven = found["max_over_mean"]
        return [] if uneven["after"] - 1.0 < (uneven["before"] - 1.0) / 2 else [part]
    cells: Mapping[str, Mapping[str, Any]] = found["pairs"] if part == "parity" else found["layouts"]
    # A few steps need not make the loss fall.
    least_fall = LEAST_LOSS_FALL if part == "parity" else None
    return [name for name, cell in cells.items() if not is_exact(cell, least_fall)]


def is_exact(cell: Mapping[str, Any], least_fall: float | None) -> bool:
    """Refused, or within the tolerances of ``rl-backend parity``: by itself, or on what transformers chose."""
    if "refused" in cell:
        return True
    if "failed" in cell or (least_fall is not None and cell["loss_fall"] < least_fall):
        return False
    # Sides that part by themselves alone chose differently between keys, or experts, that are equal but for rounding.
    return cell["first_divergence"] is None or cell.get("on_their_choices", {"step": 1})["step"] is None


def main() -> int:
    """Exit status 1 when something that was measured is not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("parity", "layouts", "push", "loads", "speed")
    parser.add_argument("--family", choices=tuple(FAMILIES), action="append", help="this one (default: all)")
    parser.add_argument("--part", choices=parts, action="append", help="this one (default: all)")
    parser.add_argument("--runs", type=int, default=RUNS, help="timed steps of each implementation and workload")
    parser.add_argument("--threads", type=int, default=THREADS, help="of the timed steps")
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.families")
    measures: dict[str, Measure] = {
        "parity": measure_parity,
        "layouts": measure_layouts,
        "push": measure_push,
        "loads": measure_loads,
        "speed": partial(measure_speed, runs=arguments.runs, threads=arguments.threads),
    }
    wrong = []
    for name in arguments.family or FAMILIES:
        for part in arguments.part or parts:
            if part == "loads" and name not in WITH_BIASES:
                continue
            if part == "speed" and name in WITHOUT_SPEED:
                print(f"{name} speed: not measured, {FAMILIES[name].corrected}", flush=True)
                continue
            started = time.perf_counter()
            with tempfile.TemporaryDirectory(prefix="rl-backend-family-") as folder:
                found = measures[part](FAMILIES[name], Path(folder))
            wrong += [f"{name} {failure}" for failure in failures(part, found)]
            record(name, part, found)
            print(f"{name} {part}: {time.perf_counter() - started:.0f} s", flush=True)
    for failure in wrong:
        print(f"not as it has to be: {failure}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
