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

from benchmarks.report import update_result
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
from tests.support.libraries import smollm2

STEPS = 20
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
        ranks, seconds = self.ranks(key, lambda folder: record_side(config, name, folder))
        return merge_ranks(ranks, plan_batch(config, config.side(name).data_parallel_size)), seconds

    def steps(self, key: str, config: ParityConfig, role: Role) -> tuple[StepNumbers, float]:
        if role == "again" and not (self.folder / key / "seconds").is_file():
            shutil.rmtree(self.states, ignore_errors=True)
            self.states.mkdir(parents=True)
        ranks, seconds = self.ranks(key, lambda folder: record_steps(config, role, folder, self.states))
        side = config.reference if role == "again" else config.candidate
        return merge_steps(ranks, side.data_parallel_size), seconds

    def compared(self, name: str, config: ParityConfig) -> dict[str, Any]:
        """Of the candidate of ``config`` with the one reference, over as many steps as it takes."""
        whole = config.replace(steps=STEPS)
        reference, first = self.side("reference", whole, "reference")
        again, second = self.steps("again", whole, "again")
        candidate, third = self.side(name, config, "candidate")
        alone, fourth = self.steps(f"{name} alone", config, "alone")
        cut = slice(config.steps)
        kept = {one: getattr(reference, one) for one in reference.__dataclass_fields__}
        kept |= {"losses": reference.losses[cut], "grad_norms": reference.grad_norms[cut]}
        floor = StepNumbers(again.losses[cut], again.grad_norms[cut])
        found = compare_sides(config, SideRecord(**kept), candidate, Tolerances.of(config.dtype), floor, alone)
        return {
            **_figures(found),
            "seconds": {"reference": first, "again": second, "candidate": third, "alone": fourth},
        }


def _figures(comparison: Comparison) -> dict[str, Any]:
    divergence, floor, alone = comparison.first_divergence, comparison.largest_floor, comparison.largest_alone
    assert floor is not None
    assert alone is not None
    return {
        "first_divergence": None if divergence is None else str(divergence),
        "max_loss_rel_diff": comparison.max_loss_difference,
        "max_grad_norm_rel_diff": comparison.max_grad_norm_difference,
        "floor": {"loss_rel_diff": floor[0], "grad_norm_rel_diff": floor[1]},
        "alone": {"loss_rel_diff": alone[0], "grad_norm_rel_diff": alone[1]},
        "steps": len(comparison.steps),
        "loss_fall": comparison.loss_fall,
    }


def main() -> int:
    """Exit status 1 when a candidate diverges or a fault is not found, 2 when there is more to run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("/tmp/rl-backend-parity-real"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="starts no further run after as long")
    parser.add_argument("--only", default="", help="what has this in its name")
    arguments = parser.parse_args()
    arguments.work.mkdir(exist_ok=True)
    runs = Runs(arguments.work, time.monotonic() + 60 * arguments.minutes)
    config = ParityConfig(
        plugins=("tests.support.faulty_runtime",),
        model=str(smollm2()),
        reference=ParitySide(runtime="transformers"),
        candidate=ParitySide(runtime="native"),
        device="cpu",
        threads=2,
    )
    whole: list[tuple[str, str, ParityConfig]] = [
        ("candidates", name, config.replace(candidate=side, steps=STEPS)) for name, side in CANDIDATES.items()
    ]
    for fault in FAULTS:
        side = ParitySide(runtime="faulty", options={"fault": fault})
        whole.append(("faults", fault, config.replace(candidate=side, steps=FAULT_STEPS)))
    results: dict[str, dict[str, Any]] = {"candidates": {}, "faults": {}}
    try:
        for group, name, each in whole:
            if arguments.only in name:
                results[group][name] = found = runs.compared(name, each)
                print(f"{name}: {found['first_divergence'] or 'no divergence'}", flush=True)
                update_result("parity_real", {"model": "SmolLM2-135M-Instruct, Q4_1", "dtype": "float32", **results})
    except TimeoutError:
        print("there is more to run: the same command continues", flush=True)
        return 2
    good = all(found["first_divergence"] is None for found in results["candidates"].values())
    return 0 if good and all(found["first_divergence"] for found in results["faults"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
