"""Parity of the families that are Llama but for fields of their specification: ``rl-backend parity`` on each of them.

For each family a random model with the fields in which it differs, and the command in a process of its own.
``results/variants.json`` has for each the command, its exit status, what it says in its last line, and its figures. It is
written after every family; ``--only NAME`` runs those whose name contains it and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.parity import SIZES
from benchmarks.random_models import RandomModel, write_model
from benchmarks.report import read_result, write_result
from tests.support.variants import VARIANTS

STEPS = 20
SECONDS = 900.0
REPOSITORY = Path(__file__).parents[1]
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    family: {"tie_word_embeddings": True, **fields} for family, fields in VARIANTS.items()
} | {"gemma3_text": {"tie_word_embeddings": True, **VARIANTS["gemma3_text"], "layer_types": LAYER_TYPES}}
"""Family -> fields that show how it differs; None leaves out one that the sizes set."""


def model_of(family: str) -> RandomModel:
    """The model that the family is compared on."""
    fields = {**SIZES, "bos_token_id": None, "eos_token_id": 1, **FAMILIES[family]}
    return RandomModel(family, {name: value for name, value in fields.items() if value is not None or "token_id" in name})


def compare(family: str, folder: Path) -> dict[str, Any]:
    """Gives the command in ``folder``; the entry of the result.

    ``verdict`` is the command's last line: that all is within the tolerances, the first divergence, or the error.
    """
    write_model(model_of(family), 0, folder / family)
    options = ["--model", family, "--steps", str(STEPS), "--json", f"{family}.json"]
    started = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "rl_backend.cli", "parity", *options],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    seconds = time.perf_counter() - started
    said = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    entry = {
        "command": f"rl-backend parity {shlex.join(options)}",
        "status": ran.returncode,
        "verdict": said[-1].strip() if said else "",
        "seconds": round(seconds, 1),
    }
    report = folder / f"{family}.json"
    return entry | figures(json.loads(report.read_text())) if report.exists() else entry


def figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the command's JSON. ``ends_elsewhere`` are modules whose outputs differ by a factor that follows."""
    kept = ("dtype", "max_loss_rel_diff", "max_grad_norm_rel_diff", "loss_fall", "first_divergence")
    elsewhere = [each["name"] for stage in report["stages"] for each in stage["ends_elsewhere"]]
    return {**{name: report[name] for name in kept}, "ends_elsewhere": elsewhere}


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def main() -> int:
    """Exit status 1 unless every family is within the tolerances."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="families whose name contains this; the others in the file stay")
    arguments = parser.parse_args()
    found: dict[str, Any] = read_result("variants").get("families", {}) if arguments.only else {}
    with tempfile.TemporaryDirectory(prefix="rl-backend-variants-") as folder:
        for family in FAMILIES:
            if arguments.only not in family:
                continue
            found[family] = entry = compare(family, Path(folder))
            print(f"{entry['seconds']:6.1f} s  {family}: {entry['verdict']}", flush=True)
            families = {name: found[name] for name in FAMILIES if name in found}
            within = sum(each["status"] == 0 for each in families.values())
            write_result("variants", {"steps": STEPS, "within_tolerances": within, "families": families})
    return 0 if all(each["status"] == 0 for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
