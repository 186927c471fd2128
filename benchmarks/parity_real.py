"""Parity on a real model: SmolLM2-135M-Instruct on real text in both runtimes and layouts, and deliberate faults in it.

Writes ``results/parity_real.json``. Every run of a side is kept in ``--work`` with its seconds, so the same command
continues one that stopped after ``--minutes``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.forked_ranks import start_forked_rank
from benchmarks.report import read_result, update_result
from rl_backend.contracts import ParallelConfig
from rl_backend.lab.parity.compare import (
    Comparison,
    RankRecord,
    SideRecord,
    StepNumbers,
    Tolerances,
    merge_ranks,
    merge_steps,
)
from rl_backend.lab.parity.config import ParityConfig, ParitySide, Role, plan_batch
from rl_backend.lab.parity.run import compare_sides, record_side, record_steps
from rl_backend.lab.text import finite
from tests.support.libraries import smollm2

FAULT_STEPS = 3
CANDIDATES = {
    "native": ParitySide(runtime="native"),
    "bridge": ParitySide(runtime="bridge"),
    "native tp3": ParitySide(runtime="native", parallel=ParallelConfig(tp=3)),
    "native pp2": ParitySide(runtime="native", parallel=ParallelConfig(pp=2)),
    "bridge tp3": ParitySide(runtime="bridge", parallel=ParallelConfig(tp=3)),
    "bridge pp2": ParitySide(runtime="bridge", parallel=ParallelConfig(pp=2)),
}
FAULTS = (
    "loaded weight",
    "norm eps",
    "missing layer",
    "log-probs",
    "loss",
    "gradient",
    "missing gradient",
    "decay groups",
    "betas",
    "late",
)


class Runs:
    """Runs of sides, each kept with its seconds; none is started after ``deadline``."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder, self._deadline = folder, deadline
        self.states = folder / "states"

    def ranks(self, key: str, run: Callable[[Path], object]) -> tuple[list[RankRecord], float]:
        """The records of ``run``, now or earlier, and its seconds."""
        folder = self.folder / key.replace(" ", "-")
        mark = folder / "seconds"
        if not mark.is_file():
            if time.monotonic() > self._deadline:
                raise TimeoutError
            shutil.rmtree(folder, ignore_errors=True)
            start = time.monotonic()
            run(folder)
            mark.write_text(f"{time.monotonic() - start:.1f}")
            print(f"{key}: {mark.read_text()} s", flush=True)
        files = sorted(folder.glob("rank-*.pt"), key=lambda path: int(path.stem.removeprefix("rank-")))
        return [RankRecord.load(file) for file in files], float(mark.read_text())

    def side(self, key: str, config: ParityConfig, name: Any) -> tuple[SideRecord, float]:
        ranks, seconds = self.ranks(key, lambda folder: record_side(config, name, folder, start_forked_rank))
        return merge_ranks(ranks, plan_batch(config, config.side(name).data_parallel_size)), seconds

    def steps(self, key: str, config: ParityConfig, role: Role) -> tuple[StepNumbers, float]:
        if role == "again" and not (self.folder / key / "seconds").is_file():
            shutil.rmtree(self.states, ignore_errors=True)
            self.states.mkdir(parents=True)
        ranks, seconds = self.ranks(key, lambda folder: record_steps(config, role, folder, self.states, start_forked_rank))
        side = config.reference if role == "again" else config.candidate
        return merge_steps(ranks, side.data_parallel_size), seconds

    def compared(self, name: str, config: ParityConfig) -> dict[str, Any]:
        """Of the candidate of ``config`` with the one reference; steps alone are left out where it has diverged without."""
        reference, first = self.side("reference", config, "reference")
        again, second = self.steps("again", config, "again")
        candidate, third = self.side(name, config, "candidate")
        seconds = {"reference": first, "again": second, "candidate": third}
        tolerances = Tolerances.of(config.dtype)
        start = time.monotonic()
        found = compare_sides(config, reference, candidate, tolerances, again)
        if found.first_divergence is None:
            alone, seconds["alone"] = self.steps(f"{name} alone", config, "alone")
            start = time.monotonic()
            found = compare_sides(config, reference, candidate, tolerances, again, alone)
        return {**_figures(found), "seconds": {**seconds, "comparison": round(time.monotonic() - start, 1)}}


def _figures(comparison: Comparison) -> dict[str, Any]:
    divergence, floor, alone = comparison.first_divergence, comparison.largest_floor, comparison.largest_alone
    figures: dict[str, Any] = {
        "first_divergence": None if divergence is None else str(divergence),
        "loss_and_grad_norm_rel_diff": (comparison.max_loss_difference, comparison.max_grad_norm_difference),
        "floor": floor,
        "alone": alone,
        "steps": len(comparison.steps),
        "loss_fall": comparison.loss_fall,
    }
    plain: dict[str, Any] = finite(figures)
    return plain


def main() -> int:
    """Exit status 1 when a candidate diverges or a fault is not found, 2 when there is more to run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("/tmp/rl-backend-parity-real"), help="folder of the runs")
    parser.add_argument("--steps", type=int, default=20, help="of the candidates")
    parser.add_argument("--minutes", type=float, default=60.0, help="starts no further run after as long")
    parser.add_argument("--only", default="", help="what has this in its name")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    config = ParityConfig(
        plugins=("tests.support.faulty_runtime",),
        model=str(smollm2()),
        reference=ParitySide(runtime="transformers"),
        candidate=ParitySide(runtime="native"),
        device="cpu",
        threads=2,
    )
    faults = {fault: ParitySide(runtime="faulty", options={"fault": fault}) for fault in FAULTS}
    groups = {"faults": (faults, FAULT_STEPS), "candidates": (CANDIDATES, arguments.steps)}
    results: dict[str, dict[str, Any]] = {name: dict(read_result("parity_real").get(name, {})) for name in groups}
    try:
        for group, (sides, steps) in groups.items():
            folder = arguments.work / f"{steps}-steps"
            folder.mkdir(parents=True, exist_ok=True)
            runs = Runs(folder, deadline)
            for name, side in sides.items():
                if arguments.only not in f"{group} {name}":
                    continue
                results[group][name] = found = runs.compared(name, config.replace(candidate=side, steps=steps))
                print(f"{name}: {found['first_divergence'] or 'no divergence'}", flush=True)
                update_result("parity_real", {"model": "SmolLM2-135M-Instruct, Q4_1", "dtype": "float32", **results})
    except TimeoutError:
        print("there is more to run: the same command continues", flush=True)
        return 2
    good = all(found["first_divergence"] is None for found in results["candidates"].values())
    return 0 if good and all(found["first_divergence"] for found in results["faults"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
